"""Attention block: projections, head norms, rotation, cache write, attention, projection.

The gate on what attention gives, where there is one: Qiu et al., "Gated Attention for Large Language Models", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import Array, Arrays, BenchShape, BoundOp, Case, Dims, Operand, OpSpec, OpTable
from pocketllm.kernels.linear.spec import make_weights as make_linear
from pocketllm.kernels.paged_attention.spec import make_caches, make_layout
from pocketllm.kernels.rms_norm.spec import make_eps


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Scalars of the op.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads, a divisor of `heads`.
        head_dim: numbers of a head.
        scale: multiplies the products of queries and keys.
        window: how many keys a query sees at most, its own included; 0 means all.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0 means they stay.
        interleaved: rotary pairs are neighbours, else halves.
        norm_eps: of the head norms; needed where there are any.
        norm_offset: added to the head norms' weights.
        rotary: False leaves queries and keys unrotated, and `angles` out.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    interleaved: bool = False
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    rotary: bool = True


def compose(ops: OpTable, s: AttentionBlock, weights: Arrays) -> BoundOp:
    """``o(attention(rotary(norm(q(x))), ...))``, keys and values by way of the cache.

    With a `q_gate` what attention gives is multiplied by ``sigmoid(q_gate(x))``.
    """
    if s.norm_eps <= 0 and not weights.keys().isdisjoint({"q_norm", "k_norm"}):
        raise ValueError(f"attention_block: q_norm and k_norm need a norm_eps above 0, not {s.norm_eps}")
    project_q, project_k, project_v, project_o = (
        ops.bind("linear", {"weight": weights[name], "bias": weights.get(f"{name}_bias")}) for name in "qkvo"
    )
    q_norm, k_norm = (
        ops.bind("rms_norm", {"weight": weights[name]}, eps=s.norm_eps, weight_offset=s.norm_offset)
        if name in weights
        else None
        for name in ("q_norm", "k_norm")
    )
    project_gate = ops.bind("linear", {"weight": weights["q_gate"]}) if "q_gate" in weights else None
    sigmoid_gate = None if project_gate is None else ops.bind("sigmoid_gate")
    rotate = ops.bind("rotary", interleaved=s.interleaved) if s.rotary else None
    kv_write = ops.bind("kv_write")
    attend = ops.bind(
        "paged_attention", {"sinks": weights.get("sinks")}, scale=s.scale, window=s.window, softcap=s.softcap
    )

    def attention_block(
        x: Array,
        angles: Array,
        key_cache: Array,
        value_cache: Array,
        slots: Array,
        query_start: Array,
        context_len: Array,
        block_table: Array,
        out: Array = None,
    ) -> Array:
        rows = x.shape[0]
        q = project_q(x).reshape(rows, s.heads, s.head_dim)
        k = project_k(x).reshape(rows, s.kv_heads, s.head_dim)
        v = project_v(x).reshape(rows, s.kv_heads, s.head_dim)
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        if rotate is not None:
            rotate(q, angles)
            rotate(k, angles)
        kv_write(k, v, key_cache, value_cache, slots)
        mixed = attend(q, key_cache, value_cache, query_start, context_len, block_table)
        mixed = mixed.reshape(rows, s.heads * s.head_dim)
        if project_gate is not None and sigmoid_gate is not None:
            sigmoid_gate(mixed, project_gate(x))
        return project_o(mixed, out=out)

    return attention_block


def make_scalars(rng: np.random.Generator, dims: Dims) -> dict[str, Any]:
    """Of the fields, those that differ between families are drawn."""
    head_dim = 2 * dims["F"] + dims["rest"]
    ragged = bool(dims["ragged"])
    return {
        "heads": dims["kv_heads"] * dims["group"],
        "kv_heads": dims["kv_heads"],
        "head_dim": head_dim,
        "scale": 1.0 / float(np.sqrt(head_dim)),
        "window": int(rng.choice([0, 0, 3])) if ragged else 0,
        "softcap": float(rng.choice([0.0, 0.0, 5.0])) if ragged else 0.0,
        "interleaved": bool(rng.integers(2)),
        "norm_eps": make_eps(rng),
        "norm_offset": float(rng.integers(2)),
        "rotary": bool(rng.integers(4)),
    }


def make_weights(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[Any]]:
    """The projections; biases, head norms, a gate and sinks now and then."""
    head_dim, hidden = 2 * dims["F"] + dims["rest"], dims["hidden"]
    heads, kv_heads = dims["kv_heads"] * dims["group"], dims["kv_heads"]
    bias = bool(rng.integers(2))
    weights: dict[str, npt.NDArray[Any]] = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weights |= make_linear(rng, name, (count * head_dim, hidden), bias=bias)
    weights |= make_linear(rng, "o", (hidden, heads * head_dim), bias=bias)
    if rng.integers(2):
        weights["q_norm"], weights["k_norm"] = rng.uniform(0.5, 1.5, size=(2, head_dim)).astype(np.float32)
    if rng.integers(3) == 0:
        weights |= make_linear(rng, "q_gate", (heads * head_dim, hidden), bias=False)
    if dims["ragged"] and rng.integers(3) == 0:
        weights["sinks"] = rng.standard_normal(heads, dtype=np.float32)
    return weights


def make_arrays(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[Any]]:
    """Inputs, with caches that hold NaN where no token lies."""
    layout = make_layout(rng, dims)
    rows = int(layout["query_start"][-1])
    angle = rng.uniform(-np.pi, np.pi, size=(rows, dims["F"]))
    return {
        "x": rng.standard_normal((rows, dims["hidden"]), dtype=np.float32),
        "angles": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
        **make_caches(rng, {**dims, "D": 2 * dims["F"] + dims["rest"]}, layout),
        **layout,
    }


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A random block of a random family."""
    return Case(AttentionBlock(**make_scalars(rng, dims)), make_weights(rng, dims), make_arrays(rng, dims))


WEIGHTS = (
    Operand("q", ("heads*D", "hidden"), dtype="weight", role="weight"),
    Operand("k", ("kv_heads*D", "hidden"), dtype="weight", role="weight"),
    Operand("v", ("kv_heads*D", "hidden"), dtype="weight", role="weight"),
    Operand("o", ("hidden", "heads*D"), dtype="weight", role="weight"),
    Operand("q_bias", ("heads*D",), dtype="float32", role="weight", optional=True),
    Operand("k_bias", ("kv_heads*D",), dtype="float32", role="weight", optional=True),
    Operand("v_bias", ("kv_heads*D",), dtype="float32", role="weight", optional=True),
    Operand("o_bias", ("hidden",), dtype="float32", role="weight", optional=True),
    Operand("q_norm", ("D",), dtype="float32", role="weight", optional=True),
    Operand("k_norm", ("D",), dtype="float32", role="weight", optional=True),
    Operand("q_gate", ("heads*D", "hidden"), dtype="weight", role="weight", optional=True),
    Operand("sinks", ("heads",), dtype="float32", role="weight", optional=True),
)

STEP = (
    Operand("angles", ("T", 2, "F"), dtype="float32", optional=True),
    Operand("key_cache", ("blocks", "block_size", "kv_heads", "D"), dtype="cache", role="inout"),
    Operand("value_cache", ("blocks", "block_size", "kv_heads", "D"), dtype="cache", role="inout"),
    Operand("slots", ("T",), dtype="int64"),
    Operand("query_start", ("S+1",), dtype="int32"),
    Operand("context_len", ("S",), dtype="int32"),
    Operand("block_table", ("S", "B"), dtype="int32"),
)
"""What every attention block of a step is called with besides its input; the meaning is `paged_attention`'s."""

DIMS = {
    "S": (0, 3),
    "hidden": (1, 30),
    "kv_heads": (1, 2),
    "group": (1, 3),
    "F": (1, 8),
    "rest": (0, 3),
    "block_size": (1, 5),
    "context": (1, 12),
    "new": (1, 1),
    "ragged": (1, 1),
}


def bench_dims(sequences: int, new: int, context: int) -> dict[str, int]:
    """A step of blocks with the sizes of a model of 135 million parameters."""
    sizes = {"hidden": 576, "kv_heads": 3, "group": 3, "F": 32, "rest": 0, "block_size": 16}
    return sizes | {"S": sequences, "context": context, "new": new, "ragged": 0}


def _bench(sequences: int, new: int, context: int) -> BenchShape:
    rows, q, kv, hidden = sequences * new, 576, 192, 576
    weights = hidden * (2 * q + 2 * kv)
    pairs = sequences * sum(range(context - new + 1, context + 1))
    return BenchShape(
        bench_dims(sequences, new, context),
        nbytes=4 * (weights + 2 * rows * hidden + 2 * sequences * context * kv),
        operations=2 * rows * weights + 4 * pairs * q,
    )


SPEC = OpSpec(
    name="attention_block",
    summary="Projections, head norms, rotation, cache write, attention, gate and output projection.",
    scalars=AttentionBlock,
    operands=(*WEIGHTS, Operand("x", ("T", "hidden")), *STEP, Operand("out", ("T", "hidden"), role="output")),
    make_case=make_case,
    dims=DIMS,
    compose=compose,
    bench=(_bench(1, 1, 1024), _bench(8, 1, 1024), _bench(1, 512, 512)),
)
