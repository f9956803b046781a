"""Gated DeltaNet block: projections, convolution, delta rule, gated norm, projection.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.causal_conv1d.spec import make_layout, make_state
from pocketllm.kernels.contract import Array, Arrays, BenchShape, BoundOp, Case, Dims, Operand, OpSpec, OpTable
from pocketllm.kernels.linear.spec import make_weights as make_linear
from pocketllm.kernels.rms_norm.spec import make_eps


@dataclass(frozen=True, slots=True)
class DeltaBlock:
    """Scalars of the op.

    Attributes:
        key_heads: heads of queries and keys, a divisor of `value_heads`.
        value_heads: heads of values, states and outputs.
        key_dim: numbers of a query or key.
        value_dim: numbers of a value.
        eps: of the gated norm.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float


def compose(ops: OpTable, s: DeltaBlock, weights: Arrays) -> BoundOp:
    """``o(gated_norm(delta_rule(convolution(qkv(x)), a(x), b(x)), z(x)))``, by way of the states."""
    qkv, z, a, b, o = (ops.bind("linear", {"weight": weights[name]}) for name in ("qkv", "z", "a", "b", "o"))
    channels, _, taps = weights["conv"].shape
    convolution = ops.bind("causal_conv1d", {"weight": weights["conv"].reshape(channels, taps)})
    delta_rule = ops.bind(
        "gated_delta_rule",
        {"a_log": weights["a_log"], "dt_bias": weights["dt_bias"]},
        key_heads=s.key_heads,
        value_heads=s.value_heads,
        key_dim=s.key_dim,
        value_dim=s.value_dim,
    )
    gated_norm = ops.bind("gated_rms_norm", {"weight": weights["norm"]}, eps=s.eps)

    def delta_block(
        x: Array,
        conv_state: Array,
        recurrent_state: Array,
        query_start: Array,
        state_slot: Array,
        save_slot: Array,
        out: Array = None,
    ) -> Array:
        rows = x.shape[0]
        slots = (query_start, state_slot, save_slot)
        mixed = convolution(qkv(x), conv_state, *slots)
        read = delta_rule(mixed, a(x), b(x), recurrent_state, *slots)
        gate = z(x).reshape(rows, s.value_heads, s.value_dim)
        return o(gated_norm(read, gate).reshape(rows, s.value_heads * s.value_dim), out=out)

    return delta_block


def make_scalars(rng: np.random.Generator, dims: Dims) -> dict[str, Any]:
    """Heads and sizes as `dims` say."""
    key_heads = dims["key_heads"]
    return {
        "key_heads": key_heads,
        "value_heads": key_heads * dims["group"],
        "key_dim": dims["key_dim"],
        "value_dim": dims["value_dim"],
        "eps": make_eps(rng),
    }


def make_weights(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[Any]]:
    """Projections, convolution, decays and norm."""
    hidden, value_heads = dims["hidden"], dims["key_heads"] * dims["group"]
    values = value_heads * dims["value_dim"]
    channels = 2 * dims["key_heads"] * dims["key_dim"] + values
    weights: dict[str, npt.NDArray[Any]] = {}
    for name, rows in (("qkv", channels), ("z", values), ("a", value_heads), ("b", value_heads)):
        weights |= make_linear(rng, name, (rows, hidden), bias=False)
    weights |= make_linear(rng, "o", (hidden, values), bias=False)
    weights["conv"] = rng.standard_normal((channels, 1, dims["past"] + 1), dtype=np.float32)
    weights["a_log"] = rng.uniform(-2, 1, size=value_heads).astype(np.float32)
    weights["dt_bias"] = rng.standard_normal(value_heads, dtype=np.float32)
    weights["norm"] = rng.uniform(0.5, 1.5, size=dims["value_dim"]).astype(np.float32)
    return weights


def make_arrays(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[Any]]:
    """Inputs, with states that hold NaN where none is read."""
    layout = make_layout(rng, dims)
    value_heads = dims["key_heads"] * dims["group"]
    channels = 2 * dims["key_heads"] * dims["key_dim"] + value_heads * dims["value_dim"]
    recurrent = (value_heads, dims["key_dim"], dims["value_dim"])
    return {
        "x": rng.standard_normal((int(layout["query_start"][-1]), dims["hidden"]), dtype=np.float32),
        "conv_state": make_state(rng, dims, (channels, dims["past"]), layout["state_slot"]),
        "recurrent_state": make_state(rng, dims, recurrent, layout["state_slot"]),
        **layout,
    }


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A random block."""
    return Case(DeltaBlock(**make_scalars(rng, dims)), make_weights(rng, dims), make_arrays(rng, dims))


WEIGHTS = (
    Operand("qkv", ("channels", "hidden"), dtype="weight", role="weight"),
    Operand("z", ("values", "hidden"), dtype="weight", role="weight"),
    Operand("a", ("value_heads", "hidden"), dtype="weight", role="weight"),
    Operand("b", ("value_heads", "hidden"), dtype="weight", role="weight"),
    Operand("o", ("hidden", "values"), dtype="weight", role="weight"),
    Operand("conv", ("channels", 1, "past+1"), dtype="float32", role="weight"),
    Operand("a_log", ("value_heads",), dtype="float32", role="weight"),
    Operand("dt_bias", ("value_heads",), dtype="float32", role="weight"),
    Operand("norm", ("value_dim",), dtype="float32", role="weight"),
)

STEP = (
    Operand("conv_state", ("slots", "channels", "past"), dtype="float32", role="inout"),
    Operand("recurrent_state", ("slots", "value_heads", "key_dim", "value_dim"), dtype="float32", role="inout"),
    Operand("query_start", ("S+1",), dtype="int32"),
    Operand("state_slot", ("S",), dtype="int32"),
    Operand("save_slot", ("T",), dtype="int32"),
)
"""What a step's every block is called with besides its input; the meaning is `causal_conv1d`'s."""

DIMS = {
    "S": (0, 3),
    "new": (1, 4),
    "ragged": (1, 1),
    "hidden": (1, 30),
    "key_heads": (1, 2),
    "group": (1, 3),
    "key_dim": (1, 12),
    "value_dim": (1, 12),
    "past": (1, 3),
}


def bench_dims(sequences: int, new: int) -> dict[str, int]:
    """A step of blocks with the sizes of a model of 800 million parameters."""
    sizes = {"hidden": 1024, "key_heads": 16, "group": 1, "key_dim": 128, "value_dim": 128, "past": 3}
    return sizes | {"S": sequences, "new": new, "ragged": 0}


def bench_cost(sequences: int, new: int) -> tuple[int, int]:
    """Bytes that must move and operations that must be done for `bench_dims`."""
    rows, hidden, heads, dim = sequences * new, 1024, 16, 128
    channels, values = 3 * heads * dim, heads * dim
    weights = hidden * (channels + 2 * values + 2 * heads)
    state = heads * dim * dim + 3 * channels
    return 4 * (weights + 2 * rows * hidden + 2 * sequences * state), 2 * rows * (weights + 4 * heads * dim * dim)


def _bench(sequences: int, new: int) -> BenchShape:
    nbytes, operations = bench_cost(sequences, new)
    return BenchShape(bench_dims(sequences, new), nbytes=nbytes, operations=operations)


SPEC = OpSpec(
    name="delta_block",
    summary="Gated DeltaNet: projections, convolution, delta rule, gated norm and output projection.",
    scalars=DeltaBlock,
    operands=(*WEIGHTS, Operand("x", ("T", "hidden")), *STEP, Operand("out", ("T", "hidden"), role="output")),
    make_case=make_case,
    dims=DIMS,
    compose=compose,
    bench=(_bench(1, 1), _bench(8, 1), _bench(1, 128)),
)
