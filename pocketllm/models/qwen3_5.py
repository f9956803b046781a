"""qwen3_5: Qwen 3.5's text models: layers of Gated DeltaNet with full attention between them.

Source of the linear layers: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024. Of a
multimodal checkpoint this family is the text part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import CheckpointError
from pocketllm.kernels.contract import Arrays, BoundOp, OpTable
from pocketllm.models.attention_layer import run_attention
from pocketllm.models.config_reader import ConfigReader
from pocketllm.models.dense_decoder import MOST_HEAD_DIM, MOST_LAYERS
from pocketllm.models.family import (
    LayerCaches,
    ModelOutput,
    Naming,
    PagedCache,
    RowSlice,
    StateCache,
    Step,
    WeightSpec,
)
from pocketllm.models.output_head import OutputHead
from pocketllm.models.rotary import Rotary, bind_angles, rotary_from_hf

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a Gated DeltaNet block.

    Attributes:
        key_heads, value_heads: heads; a key head serves the same number of value heads as any other.
        key_dim, value_dim: numbers of a head.
        kernel: inputs that a channel's convolution sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly "
                "(linear_num_value_heads, linear_num_key_heads)"
            )

    @property
    def channels(self) -> int:
        """Numbers of a row of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of a row of values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """A hybrid decoder.

    Attributes:
        model_type: the family.
        vocab_size, hidden_size, heads, kv_heads, head_dim, intermediate_size: sizes; heads are those of attention.
        kinds: `LINEAR` or `FULL` for each layer.
        delta: of the linear layers.
        context_length: tokens that the model was made for.
        norm_eps: of every RMSNorm.
        rotary: of the attention layers; it turns a part of each head.
        tied_embeddings: the output head may be the embedding, where the file has no head of its own.
        eos_token_ids: end-of-sequence ids that the configuration names.
        prefix: what the decoder's tensors are called by.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    kinds: tuple[str, ...]
    delta: DeltaNet
    context_length: int
    norm_eps: float
    rotary: Rotary
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    prefix: str

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly (num_attention_heads, "
                "num_key_value_heads)"
            )

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """See `ModelConfig.rotaries`."""
        return (self.rotary,)


def parse_config(naming: Naming, raw: Mapping[str, Any]) -> Qwen35Config:
    """See `Family.parse_config`. The configuration of a multimodal checkpoint has the text's under ``text_config``."""
    if naming == "gguf":
        raise CheckpointError("qwen3_5 is read from safetensors only: its GGUF files order heads differently")
    reader = ConfigReader(raw)
    text = reader.nested("text_config")
    if text is None and "text_config" in raw:
        raise reader.error("text_config", "is empty: it has the language model's configuration")
    if text is None:
        config = _text_config(reader, "model.", tied=None)
        reader.finish()
        return config
    config = _text_config(text, "model.language_model.", tied=reader.flag("tie_word_embeddings"))
    text.finish()
    # About images and video, or what the text's part says again.
    reader.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    reader.ignore("max_position_embeddings", "eos_token_id", "vocab_size", "language_model_only")
    reader.finish()
    return config


def _text_config(reader: ConfigReader, prefix: str, *, tied: bool | None) -> Qwen35Config:
    """`tied` is what a multimodal checkpoint says for the whole; its text part alone would be overruled."""
    layers = reader.integer("num_hidden_layers", 32, most=MOST_LAYERS)
    head_dim = reader.integer("head_dim", 256, most=MOST_HEAD_DIM)
    context_length = reader.integer("max_position_embeddings", 32768, least=2)
    reader.expect("hidden_act", ("silu", "swish"), "silu")
    reader.expect("attn_output_gate", (True,), True)
    reader.expect("attention_bias", (False,), False)
    reader.expect("mamba_ssm_dtype", ("float32",), "float32")
    reader.expect("mtp_use_dedicated_embeddings", (False,), False)
    reader.ignore("mtp_num_hidden_layers")  # the head that predicts further tokens is a model of its own
    own_tied = reader.flag("tie_word_embeddings")
    return Qwen35Config(
        model_type="qwen3_5",
        vocab_size=reader.integer("vocab_size", 248320),
        hidden_size=reader.integer("hidden_size", 4096),
        heads=reader.integer("num_attention_heads", 16),
        kv_heads=reader.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size", 12288),
        kinds=_kinds(reader, layers),
        delta=DeltaNet(
            key_heads=reader.integer("linear_num_key_heads", 16),
            value_heads=reader.integer("linear_num_value_heads", 32),
            key_dim=reader.integer("linear_key_head_dim", 128),
            value_dim=reader.integer("linear_value_head_dim", 128),
            kernel=reader.integer("linear_conv_kernel_dim", 4, least=2),
        ),
        context_length=context_length,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rotary=_text_rotary(reader, head_dim, context_length),
        tied_embeddings=own_tied if tied is None else tied,
        eos_token_ids=reader.token_ids("eos_token_id"),
        prefix=prefix,
    )


def _kinds(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """From ``layer_types``, or the older ``full_attention_interval``."""
    interval = reader.integer("full_attention_interval", 4)
    kinds = reader.get("layer_types")
    if kinds is None:
        return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.error("layer_types", f"does not name {layers} layers")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise reader.error("layer_types", f"has {kind!r}; supported: {LINEAR}, {FULL}")
    return tuple(kinds)


def _text_rotary(reader: ConfigReader, head_dim: int, context_length: int) -> Rotary:
    """Of text alone: the three positions of a token (time, height, width) are one and the same."""
    return rotary_from_hf(
        reader,
        head_dim=head_dim,
        context_length=context_length,
        default_theta=10_000_000.0,
        default_share=0.25,
        inert=("mrope_section", "mrope_interleaved"),
    )


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight's name, where it is stored below its layer, and its shape in terms of `_sizes`."""

    name: str
    stored_as: str
    shape: tuple[str, ...]


_BOTH = (
    _Weight("attention_norm", "input_layernorm.weight", ("hidden",)),
    _Weight("mlp_norm", "post_attention_layernorm.weight", ("hidden",)),
    _Weight("gate", "mlp.gate_proj.weight", ("inner", "hidden")),
    _Weight("up", "mlp.up_proj.weight", ("inner", "hidden")),
    _Weight("down", "mlp.down_proj.weight", ("hidden", "inner")),
)
_OF_KIND = {
    LINEAR: (
        _Weight("qkv", "linear_attn.in_proj_qkv.weight", ("channels", "hidden")),
        _Weight("z", "linear_attn.in_proj_z.weight", ("values", "hidden")),
        _Weight("a", "linear_attn.in_proj_a.weight", ("value_heads", "hidden")),
        _Weight("b", "linear_attn.in_proj_b.weight", ("value_heads", "hidden")),
        _Weight("conv", "linear_attn.conv1d.weight", ("channels", "one", "kernel")),
        _Weight("a_log", "linear_attn.A_log", ("value_heads",)),
        _Weight("dt_bias", "linear_attn.dt_bias", ("value_heads",)),
        _Weight("norm", "linear_attn.norm.weight", ("value_dim",)),
        _Weight("o", "linear_attn.out_proj.weight", ("hidden", "values")),
    ),
    FULL: (
        _Weight("q", "self_attn.q_proj.weight", ("q_size", "hidden")),
        _Weight("q_gate", "self_attn.q_proj.weight", ("q_size", "hidden")),
        _Weight("k", "self_attn.k_proj.weight", ("kv_size", "hidden")),
        _Weight("v", "self_attn.v_proj.weight", ("kv_size", "hidden")),
        _Weight("q_norm", "self_attn.q_norm.weight", ("head_dim",)),
        _Weight("k_norm", "self_attn.k_norm.weight", ("head_dim",)),
        _Weight("o", "self_attn.o_proj.weight", ("hidden", "q_size")),
    ),
}


def _sizes(config: Qwen35Config) -> dict[str, int]:
    return {
        "one": 1,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "head_dim": config.head_dim,
        "q_size": config.heads * config.head_dim,
        "kv_size": config.kv_heads * config.head_dim,
        "channels": config.delta.channels,
        "values": config.delta.values,
        "value_heads": config.delta.value_heads,
        "value_dim": config.delta.value_dim,
        "kernel": config.delta.kernel,
    }


def weights(config: Qwen35Config, naming: Naming) -> tuple[WeightSpec, ...]:
    """See `Family.weights`; a layer's weights are called ``<layer>.<name>``."""
    table = (config.vocab_size, config.hidden_size)
    return (
        WeightSpec("embedding", table, f"{config.prefix}embed_tokens.weight"),
        WeightSpec("norm", (config.hidden_size,), f"{config.prefix}norm.weight"),
        WeightSpec("head", table, "lm_head.weight", optional=config.tied_embeddings),
        *(
            spec
            for layer, kind in enumerate(config.kinds)
            for spec in layer_weights(config, kind, str(layer), f"{config.prefix}layers.{layer}.")
        ),
    )


def layer_weights(config: Qwen35Config, kind: str, name: str, stored: str) -> Iterator[WeightSpec]:
    """The weights of one layer, called ``<name>.<weight>`` and stored below `stored`."""
    sizes, head = _sizes(config), config.head_dim
    # The rows of a query head come before the rows of its gate, head by head.
    parts = {
        ("q", FULL): RowSlice(config.heads, 2 * head, 0, head),
        ("q_gate", FULL): RowSlice(config.heads, 2 * head, head, 2 * head),
    }
    for weight in (*_BOTH, *_OF_KIND[kind]):
        shape = tuple(sizes[size] for size in weight.shape)
        yield WeightSpec(f"{name}.{weight.name}", shape, stored + weight.stored_as, part=parts.get((weight.name, kind)))


def unread_tensors(config: Qwen35Config) -> tuple[str, ...]:
    """See `Family.unread_tensors`: the eyes of a multimodal checkpoint, and the head that predicts further tokens."""
    return "model.visual.", "mtp."


def cache_layout(config: Qwen35Config) -> tuple[LayerCaches, ...]:
    """Keys and values of attention layers; of linear ones the convolution's last inputs, and the recurrent state."""
    delta = config.delta
    entry = PagedCache((config.kv_heads, config.head_dim))
    of_kind: dict[str, LayerCaches] = {
        FULL: {"key_cache": entry, "value_cache": entry},
        LINEAR: {
            "conv": StateCache((delta.channels, delta.kernel - 1)),
            "recurrent": StateCache((delta.value_heads, delta.key_dim, delta.value_dim)),
        },
    }
    return tuple(of_kind[kind] for kind in config.kinds)


class HybridDecoder:
    """The built model: embedding, layers of both kinds and head, bound to their weights."""

    def __init__(self, config: Qwen35Config, weights: Arrays, ops: OpTable) -> None:
        self._embedding = ops.bind("embedding", {"table": weights["embedding"]})
        self._angles = bind_angles(config.rotary, ops)
        self._layers = [
            (kind, bind_layer(config, kind, str(layer), weights, ops)) for layer, kind in enumerate(config.kinds)
        ]
        head = weights.get("head", weights["embedding"])
        self._head = OutputHead(ops, weights["norm"], head, eps=config.norm_eps, norm_offset=1.0)

    def forward(self, step: Step, caches: Sequence[Arrays]) -> ModelOutput:
        """See `Model.forward`."""
        x = self._embedding(step.token_ids)
        angles = self._angles(step.positions, step.rope_lengths)
        for (kind, layer), cache in zip(self._layers, caches, strict=True):
            if kind == LINEAR:
                layer(x, cache["conv"], cache["recurrent"], step.query_start, step.state_slots, step.save_slots)
            else:
                run_attention(layer, x, angles, step, cache)
        return self._head(x, step)


def build(config: Qwen35Config, weights: Arrays, ops: OpTable) -> HybridDecoder:
    """See `Family.build`."""
    return HybridDecoder(config, weights, ops)


def bind_layer(config: Qwen35Config, kind: str, name: str, weights: Arrays, ops: OpTable) -> BoundOp:
    """A layer of either kind with the weights of that name. Its norms' weights are stored as differences from one."""
    own = {weight.name: weights[f"{name}.{weight.name}"] for weight in (*_BOTH, *_OF_KIND[kind])}
    if kind == LINEAR:
        delta = config.delta
        return ops.bind(
            "delta_layer",
            own,
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            eps=config.norm_eps,
            norm_offset=1.0,
        )
    return ops.bind(
        "decoder_layer",
        own,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        norm_eps=config.norm_eps,
        norm_offset=1.0,
        eps=config.norm_eps,
    )


def tiny_config() -> dict[str, Any]:
    """See `Family.tiny_config`."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
