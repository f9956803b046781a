"""The dense pre-norm decoder that llama made common: RMSNorm, rotary grouped-query attention, SwiGLU.

Families that differ from it by a bias, a norm or a window describe themselves by a `DecoderConfig`; their modules only
read their configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import CheckpointError
from pocketllm.kernels.contract import Arrays, BoundOp, OpTable
from pocketllm.models.attention_layer import run_attention
from pocketllm.models.config_reader import ConfigReader
from pocketllm.models.family import LayerCaches, ModelOutput, Naming, PagedCache, Step, WeightSpec
from pocketllm.models.output_head import OutputHead
from pocketllm.models.rotary import Rotary, bind_angles, rotary_from_gguf, rotary_from_hf
from pocketllm.models.windows import windows_from_hf

MOST_LAYERS = 10_000
MOST_HEAD_DIM = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A dense decoder.

    Attributes:
        model_type: the family.
        vocab_size, hidden_size, layers, heads, kv_heads, head_dim, intermediate_size: sizes.
        context_length: tokens that the model was made for.
        norm_eps: of every RMSNorm.
        rotary: the rotary embedding.
        windows: for each layer how many keys a token sees, its own included; 0 is all of them.
        tied_embeddings: the output head may be the embedding, where the file has no head of its own.
        qkv_bias, output_bias, mlp_bias: which linears carry a bias.
        qk_norm: q and k pass an RMSNorm for each head before they are rotated.
        paired_qk: the file stores q and k rows in pairs (see `WeightSpec.unpair_heads`).
        eos_token_ids: end-of-sequence ids that the configuration names.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    norm_eps: float
    rotary: Rotary
    windows: tuple[int, ...]
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    paired_qk: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly (num_attention_heads and "
                "num_key_value_heads, or attention.head_count and attention.head_count_kv)"
            )

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """See `ModelConfig.rotaries`."""
        return (self.rotary,)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight's names, and its shape in terms of the configuration's sizes."""

    name: str
    hf: str
    gguf: str
    shape: tuple[str, ...]
    flag: str | None = None


_WHOLE = (
    _Weight("embedding", "model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    _Weight("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),
)
_HEAD = _Weight("head", "lm_head.weight", "output.weight", ("vocab_size", "hidden_size"))
_LAYER = (
    _Weight("attention_norm", "input_layernorm.weight", "attn_norm.weight", ("hidden_size",)),
    _Weight("q", "self_attn.q_proj.weight", "attn_q.weight", ("q_size", "hidden_size")),
    _Weight("k", "self_attn.k_proj.weight", "attn_k.weight", ("kv_size", "hidden_size")),
    _Weight("v", "self_attn.v_proj.weight", "attn_v.weight", ("kv_size", "hidden_size")),
    _Weight("o", "self_attn.o_proj.weight", "attn_output.weight", ("hidden_size", "q_size")),
    _Weight("q_bias", "self_attn.q_proj.bias", "attn_q.bias", ("q_size",), "qkv_bias"),
    _Weight("k_bias", "self_attn.k_proj.bias", "attn_k.bias", ("kv_size",), "qkv_bias"),
    _Weight("v_bias", "self_attn.v_proj.bias", "attn_v.bias", ("kv_size",), "qkv_bias"),
    _Weight("o_bias", "self_attn.o_proj.bias", "attn_output.bias", ("hidden_size",), "output_bias"),
    _Weight("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", ("head_dim",), "qk_norm"),
    _Weight("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", ("head_dim",), "qk_norm"),
    _Weight("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", ("hidden_size",)),
    _Weight("gate", "mlp.gate_proj.weight", "ffn_gate.weight", ("intermediate_size", "hidden_size")),
    _Weight("up", "mlp.up_proj.weight", "ffn_up.weight", ("intermediate_size", "hidden_size")),
    _Weight("down", "mlp.down_proj.weight", "ffn_down.weight", ("hidden_size", "intermediate_size")),
    _Weight("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", ("intermediate_size",), "mlp_bias"),
    _Weight("up_bias", "mlp.up_proj.bias", "ffn_up.bias", ("intermediate_size",), "mlp_bias"),
    _Weight("down_bias", "mlp.down_proj.bias", "ffn_down.bias", ("hidden_size",), "mlp_bias"),
)


def weights(config: DecoderConfig, naming: Naming) -> tuple[WeightSpec, ...]:
    """See `Family.weights`; a layer's weights are called ``<layer>.<name>``."""
    return tuple(_weight_specs(config, naming))


def _weight_specs(config: DecoderConfig, naming: Naming) -> Iterator[WeightSpec]:
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "q_size": config.heads * config.head_dim,
        "kv_size": config.kv_heads * config.head_dim,
    }

    def shape(weight: _Weight) -> tuple[int, ...]:
        return tuple(sizes[size] for size in weight.shape)

    for weight in _WHOLE:
        yield WeightSpec(weight.name, shape(weight), weight.hf if naming == "hf" else weight.gguf)
    head_name = _HEAD.hf if naming == "hf" else _HEAD.gguf
    yield WeightSpec(_HEAD.name, shape(_HEAD), head_name, optional=config.tied_embeddings)
    if naming == "gguf":
        rotated_pairs = (len(config.rotary.inverse_frequencies),)
        yield WeightSpec("rotary_divisors", rotated_pairs, "rope_freqs.weight", optional=True)
    paired = {"q": config.heads, "k": config.kv_heads} if config.paired_qk else {}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}." if naming == "hf" else f"blk.{layer}."
        for weight in _LAYER:
            required = weight.flag is None or getattr(config, weight.flag)
            # GGUF metadata has no key for biases: those that a file has are used.
            if required or (naming == "gguf" and weight.name.endswith("_bias")):
                stored_as = prefix + (weight.hf if naming == "hf" else weight.gguf)
                unpair = paired.get(weight.name.removesuffix("_bias"), 0)
                yield WeightSpec(
                    f"{layer}.{weight.name}", shape(weight), stored_as, optional=not required, unpair_heads=unpair
                )


def unread_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """See `Family.unread_tensors`: every tensor is read."""
    return ()


def cache_layout(config: DecoderConfig) -> tuple[LayerCaches, ...]:
    """Keys and values of every layer, one entry a token."""

    def layer(window: int) -> LayerCaches:
        entry = PagedCache((config.kv_heads, config.head_dim), window=window or None)
        return {"key_cache": entry, "value_cache": entry}

    return tuple(layer(window) for window in config.windows)


class DenseDecoder:
    """The built model: embedding, layers and head, bound to their weights."""

    def __init__(self, config: DecoderConfig, weights: Arrays, ops: OpTable) -> None:
        self._embedding = ops.bind("embedding", {"table": weights["embedding"]})
        self._angles = bind_angles(config.rotary, ops, weights.get("rotary_divisors"))
        self._layers = [_bind_layer(config, layer, weights, ops) for layer in range(config.layers)]
        head = weights.get("head", weights["embedding"])
        self._head = OutputHead(ops, weights["norm"], head, eps=config.norm_eps)

    def forward(self, step: Step, caches: Sequence[Arrays]) -> ModelOutput:
        """See `Model.forward`."""
        x = self._embedding(step.token_ids)
        angles = self._angles(step.positions, step.rope_lengths)
        for layer, cache in zip(self._layers, caches, strict=True):
            run_attention(layer, x, angles, step, cache)
        return self._head(x, step)


def build(config: DecoderConfig, weights: Arrays, ops: OpTable) -> DenseDecoder:
    """See `Family.build`."""
    return DenseDecoder(config, weights, ops)


def _bind_layer(config: DecoderConfig, layer: int, weights: Arrays, ops: OpTable) -> BoundOp:
    own = {weight.name: weights.get(f"{layer}.{weight.name}") for weight in _LAYER}
    return ops.bind(
        "decoder_layer",
        own,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.windows[layer],
        interleaved=config.rotary.interleaved,
        norm_eps=config.norm_eps,
        eps=config.norm_eps,
    )


def config_from_hf(
    reader: ConfigReader, model_type: str, defaults: Mapping[str, int], *, windowed: bool = False, **differences: Any
) -> DecoderConfig:
    """The configuration in ``config.json``.

    `defaults` are the sizes that the family's files leave out when they have these values; `windowed` families may
    have sliding windows; `differences` are fields of `DecoderConfig` that only this family sets, already read from
    `reader`.
    """

    def size(key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        return reader.integer(key, defaults.get(key, default), most=most)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    head_dim = size("head_dim", hidden // heads, most=MOST_HEAD_DIM)
    layers = size("num_hidden_layers", most=MOST_LAYERS)
    context_length = reader.integer("max_position_embeddings", defaults.get("max_position_embeddings"), least=2)
    reader.expect("hidden_act", ("silu", "swish"), "silu")
    config = DecoderConfig(
        model_type=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=size("intermediate_size"),
        context_length=context_length,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rotary=rotary_from_hf(reader, head_dim=head_dim, context_length=context_length, default_theta=10000.0),
        windows=windows_from_hf(reader, layers) if windowed else (0,) * layers,
        tied_embeddings=reader.flag("tie_word_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        **differences,
    )
    reader.finish()
    return config


def config_from_gguf(raw: Mapping[str, Any], arch: str, **differences: Any) -> DecoderConfig:
    """The configuration in GGUF metadata, which all dense decoders write alike; `differences` are the family's own."""
    reader = ConfigReader(raw)
    heads = reader.integer(f"{arch}.attention.head_count")
    hidden = reader.integer(f"{arch}.embedding_length")
    head_dim = reader.integer(f"{arch}.attention.key_length", hidden // heads, most=MOST_HEAD_DIM)
    reader.expect(f"{arch}.attention.value_length", (head_dim,), head_dim)
    layers = reader.integer(f"{arch}.block_count", most=MOST_LAYERS)
    context_length = reader.integer(f"{arch}.context_length", least=2)
    window = reader.integer(f"{arch}.attention.sliding_window", 0, least=0)
    tokens = reader.get("tokenizer.ggml.tokens", ())
    config = DecoderConfig(
        model_type=arch,
        vocab_size=reader.integer(f"{arch}.vocab_size", len(tokens) or None),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=reader.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer(f"{arch}.feed_forward_length"),
        context_length=context_length,
        norm_eps=reader.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rotary=rotary_from_gguf(reader, arch, head_dim=head_dim, context_length=context_length),
        windows=(window,) * layers,
        tied_embeddings=True,
        **differences,
    )
    reader.expect(f"{arch}.attention.causal", (True,), True)
    reader.finish(prefix=f"{arch}.")
    return config
