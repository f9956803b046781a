"""The references themselves, against code that others wrote or that says the same in another way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, Qwen3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from pocketllm.kernels.attention_block.spec import make_arrays
from pocketllm.kernels.contract import Case
from pocketllm.kernels.paged_attention.spec import PagedAttention, make_caches, make_layout
from pocketllm.kernels.registry import ReferenceOpTable, spec

Array = npt.NDArray[Any]
OPS = ReferenceOpTable()


def normal(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape)


def near(actual: Array, expected: torch.Tensor | Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 33), (4, 3, 33), (33,)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(shape[-1])
    norm = OPS.bind("rms_norm", {"weight": weight}, eps=1e-5)
    expected = functional.rms_norm(torch.tensor(x), (shape[-1],), torch.tensor(weight), 1e-5)
    near(norm(x), expected)
    residual = normal(*shape)[..., ::-1].copy()
    expected = functional.rms_norm(torch.tensor(x + residual), (shape[-1],), torch.tensor(weight), 1e-5)
    near(norm(x, residual=residual), expected)


def test_linear_and_swiglu_and_embedding() -> None:
    x, weight, bias = normal(5, 7), normal(3, 7), normal(3)
    expected = functional.linear(*map(torch.tensor, (x, weight, bias)))
    near(OPS.bind("linear", {"weight": weight, "bias": bias})(x), expected)
    gate = normal(5, 7) * 50
    near(OPS.bind("swiglu")(gate, x), functional.silu(torch.tensor(gate)) * torch.tensor(x))
    ids = np.array([2, 0, 2], dtype=np.int32)
    near(OPS.bind("embedding", {"table": weight}, scale=3.0)(ids), weight[[2, 0, 2]] * 3.0)


@pytest.mark.parametrize(
    ("rope", "scalars"),
    [
        ({"rope_type": "default"}, {}),
        ({"rope_type": "dynamic", "factor": 4.0}, {"dynamic_factor": 4.0, "original_length": 64}),
    ],
)
@pytest.mark.parametrize("length", [10, 64, 65, 5000])
def test_rotary_angles(rope: dict[str, Any], scalars: dict[str, Any], length: int) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    positions = np.array([0, 1, length // 2, length - 1], dtype=np.int32)
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    frequencies = tuple(embedding.original_inv_freq.tolist())
    cos, sin = embedding(torch.zeros(1), torch.tensor(positions)[None])
    angles = OPS.bind("rotary_angles", inverse_frequencies=frequencies, **scalars)
    out = angles(positions, lengths=np.full(4, length, dtype=np.int32))
    # transformers computes dynamic frequencies in float32, so an angle is off by a few units of itself.
    tolerance = 1e-6 if not scalars else 1e-6 + 8 * 2.0**-24 * length
    np.testing.assert_allclose(out[:, 0], cos[0, :, :16], rtol=0, atol=tolerance)
    np.testing.assert_allclose(out[:, 1], sin[0, :, :16], rtol=0, atol=tolerance)


def test_dynamic_angles_need_lengths() -> None:
    angles = OPS.bind("rotary_angles", inverse_frequencies=(1.0, 1.0), dynamic_factor=2.0, original_length=8)
    with pytest.raises(TypeError, match="needs lengths"):
        angles(np.zeros(1, np.int32))


def test_rotary_in_halves() -> None:
    x, angle = normal(5, 3, 10), normal(5, 4)
    cos, sin = (torch.tensor(np.concatenate([f(angle)] * 2, axis=1))[None] for f in (np.cos, np.sin))
    heads = torch.tensor(x[..., :8]).transpose(0, 1)[None]
    expected = modeling_llama.apply_rotary_pos_emb(heads, heads, cos, sin)[0][0].transpose(0, 1)
    turned = x.copy()
    OPS.bind("rotary")(turned, np.stack([np.cos(angle), np.sin(angle)], axis=1))
    near(turned[..., :8], expected)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])


def test_rotary_in_neighbours() -> None:
    x, angle = normal(5, 3, 8), normal(5, 4)
    turned = x.copy()
    OPS.bind("rotary", interleaved=True)(turned, np.stack([np.cos(angle), np.sin(angle)], axis=1))
    # A pair is a complex number.
    near(turned.view(np.complex128), x.view(np.complex128) * np.exp(1j * angle)[:, None])


def test_kv_write() -> None:
    key, value = normal(2, 1, 3), normal(2, 1, 3) + 1
    caches = np.zeros((2, 4, 1, 3)), np.zeros((2, 4, 1, 3), np.float16)
    OPS.bind("kv_write")(key, value, *caches, np.array([6, 1]))
    np.testing.assert_array_equal(caches[0].reshape(8, 3)[[6, 1]], key[:, 0])
    np.testing.assert_array_equal(caches[1].reshape(8, 3)[[6, 1]], value[:, 0].astype(np.float16))
    assert np.count_nonzero(caches[0]) == 6


ATTENTION_DIMS = {"S": 4, "kv_heads": 2, "group": 3, "D": 8, "block_size": 4, "context": 20, "new": 1, "ragged": 1}


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_paged_attention(window: int, kind: str) -> None:
    rng = np.random.default_rng(3)
    layout = make_layout(rng, ATTENTION_DIMS)
    caches = make_caches(rng, ATTENTION_DIMS, layout)
    q = normal(len(layout["slots"]), 6, 8)
    softcap, sinks = 2.0 if kind == "softcap" else 0.0, normal(6) if kind == "sinks" else None
    attention = OPS.bind("paged_attention", {"sinks": sinks}, scale=0.5, window=window, softcap=softcap)
    step = {name: layout[name] for name in ("query_start", "context_len", "block_table")}
    out = attention(q, **caches, **step)
    for index, context in enumerate(layout["context_len"].tolist()):
        start, stop = layout["query_start"][index : index + 2].tolist()
        key, value = (
            torch.tensor(np.stack([flat[_slot(layout, index, p)] for p in range(context)])).double()
            for flat in (cache.reshape(-1, 2, 8) for cache in caches.values())
        )
        behind = torch.arange(context - stop + start, context)[:, None] - torch.arange(context)
        hidden = (behind < 0) | ((behind >= window) if window else False)
        mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, -torch.inf)
        module = SimpleNamespace(
            num_key_value_groups=3, training=False, sinks=torch.tensor(sinks) if sinks is not None else None
        )
        forward = modeling_gpt_oss if kind == "sinks" else modeling_gemma2 if kind == "softcap" else modeling_llama
        capped = {"softcap": softcap} if kind == "softcap" else {}
        heads = (torch.tensor(q[start:stop]), key, value)
        expected, _ = forward.eager_attention_forward(
            module,
            *(part.transpose(0, 1)[None] for part in heads),
            mask[None, None],
            scaling=0.5,
            dropout=0.0,
            **capped,
        )
        # gemma2 and llama take their softmax in float32.
        near(out[start:stop], expected[0], 1e-6)


def _slot(layout: dict[str, Array], index: int, position: int) -> int:
    return int(layout["block_table"][index, position // 4]) * 4 + position % 4


LAYERS = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding, LlamaConfig),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding, Qwen3Config),
}


@pytest.mark.parametrize("family", LAYERS)
def test_decoder_layer(family: str) -> None:
    make_layer, make_rotary, make_config = LAYERS[family]
    torch.manual_seed(5)
    config = make_config(
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        attention_bias=True,
        attn_implementation="eager",
    )
    layer, tokens = make_layer(config, 0).double().eval(), 11
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = normal(tokens, 24)
    cos, sin = (part.double() for part in make_rotary(config)(torch.zeros(1), torch.arange(tokens)[None]))
    mask = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(torch.tensor(x)[None], attention_mask=mask, position_embeddings=(cos, sin))
    angles = np.stack([cos[0, :, :4].numpy(), sin[0, :, :4].numpy()], axis=1)
    caches = np.full((2, 3, 4, 2, 8), np.nan)
    norms = {"norm_eps": 1e-5} if family == "qwen3" else {}
    scalars = {"heads": 6, "kv_heads": 2, "head_dim": 8, "scale": 8**-0.5, "eps": 1e-5, **norms}
    run = OPS.bind("decoder_layer", _layer_weights(layer), **scalars)
    # A chunk of seven, a chunk of three, one decoded: the cache carries what the second and third need.
    table = np.array([[2, 0, 1]], dtype=np.int32)
    for start, stop in ((0, 7), (7, 10), (10, 11)):
        own = np.arange(start, stop)
        slots = table[0, own // 4].astype(np.int64) * 4 + own % 4
        step = (slots, np.array([0, stop - start]), np.array([stop]), table)
        rows = x[start:stop].copy()
        assert run(rows, angles[start:stop], *caches, *step) is None
        near(rows, expected[0, start:stop], 1e-6)


def _layer_weights(layer: torch.nn.Module) -> dict[str, Array]:
    names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        **{f"self_attn.{part}_proj": part for part in "qkvo"},
        **{f"self_attn.{part}_norm": f"{part}_norm" for part in "qk"},
        **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
    }
    weights = {}
    for name, parameter in layer.named_parameters():
        module, _, kind = name.rpartition(".")
        weights[names[module] + ("_bias" if kind == "bias" else "")] = parameter.detach().numpy()
    return weights


def test_attention_block_without_rotation_needs_no_angles() -> None:
    contract = spec("attention_block")
    dims = {name: high for name, (_, high) in contract.dims.items()}
    arrays = make_arrays(np.random.default_rng(1), dims)
    case = contract.make_case(np.random.default_rng(1), dims)
    weights = {name: case.weights[name] for name in "qkvo"}
    head_dim = 2 * dims["F"] + dims["rest"]
    block = OPS.bind(
        "attention_block", weights, heads=6, kv_heads=2, head_dim=head_dim, scale=0.2, norm_eps=1e-6, rotary=False
    )
    with_angles = block(**{name: array.copy() for name, array in arrays.items()})
    without = block(**{name: array.copy() for name, array in arrays.items() if name != "angles"}, angles=None)
    np.testing.assert_array_equal(with_angles, without)


def test_lm_head_and_take_rows_and_add() -> None:
    x, norm, weight = normal(5, 6), normal(6), normal(9, 6)
    logits = OPS.bind("lm_head", {"norm": norm, "weight": weight}, eps=1e-5)(x, np.array([4, 0]))
    expected = functional.rms_norm(torch.tensor(x[[4, 0]]), (6,), torch.tensor(norm), 1e-5) @ torch.tensor(weight).T
    near(logits, expected)
    total = x.copy()
    OPS.bind("add")(total, x)
    near(total, 2 * x)


def test_score() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -np.inf], [-np.inf] * 3 + [2.0], [-np.inf] * 4, [80, 81, 82, 83]], np.float32)
    targets = np.array([0, -1, 2, 3], dtype=np.int32)
    logsumexp, target, ids, values = OPS.bind("score", k=3)(logits, targets)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logsumexp, np.log(np.exp(logits.astype(np.longdouble)).sum(axis=1)), rtol=1e-7)
    np.testing.assert_array_equal(target, np.array([1.0, np.nan, -np.inf, 83.0], dtype=np.float32))
    np.testing.assert_array_equal(ids, [[1, 2, 0], [3, -1, -1], [-1, -1, -1], [3, 2, 1]])
    np.testing.assert_array_equal(values[:2], [[3, 3, 1], [2, -np.inf, -np.inf]])


def test_a_window_as_long_as_the_context_is_none() -> None:
    contract = spec("paged_attention")
    case = contract.make_case(np.random.default_rng(11), ATTENTION_DIMS)
    outs = []
    for window in (0, 20, 10**6):
        scalars = PagedAttention(case.scalars.scale, window)
        outs.append(contract.reference(scalars, **Case(scalars, {}, case.arrays).arrays))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
