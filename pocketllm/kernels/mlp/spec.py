"""Feed-forward block with a gate.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import (
    Array,
    Arrays,
    BenchShape,
    BoundOp,
    Case,
    Dims,
    NoScalars,
    Operand,
    OpSpec,
    OpTable,
)
from pocketllm.kernels.linear.spec import make_weights as make_linear


def compose(ops: OpTable, s: NoScalars, weights: Arrays) -> BoundOp:
    """``down(silu(gate(x)) * up(x))``."""
    gate, up, down = (
        ops.bind("linear", {"weight": weights[name], "bias": weights.get(f"{name}_bias")})
        for name in ("gate", "up", "down")
    )
    swiglu = ops.bind("swiglu")

    def mlp(x: Array, out: Array = None) -> Array:
        return down(swiglu(gate(x), up(x)), out=out)

    return mlp


def make_weights(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[Any]]:
    """All three weights, with all biases or none."""
    inner, hidden = dims["N"], dims["hidden"]
    bias = bool(rng.integers(2))
    return {
        **make_linear(rng, "gate", (inner, hidden), bias=bias),
        **make_linear(rng, "up", (inner, hidden), bias=bias),
        **make_linear(rng, "down", (hidden, inner), bias=bias),
    }


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Normal inputs."""
    x = rng.standard_normal((dims["T"], dims["hidden"]), dtype=np.float32)
    return Case(NoScalars(), make_weights(rng, dims), {"x": x})


WEIGHTS = (
    Operand("gate", ("N", "hidden"), dtype="weight", role="weight"),
    Operand("up", ("N", "hidden"), dtype="weight", role="weight"),
    Operand("down", ("hidden", "N"), dtype="weight", role="weight"),
    Operand("gate_bias", ("N",), dtype="float32", role="weight", optional=True),
    Operand("up_bias", ("N",), dtype="float32", role="weight", optional=True),
    Operand("down_bias", ("hidden",), dtype="float32", role="weight", optional=True),
)


def _bench(rows: int) -> BenchShape:
    hidden, inner = 576, 1536
    return BenchShape(
        {"T": rows, "hidden": hidden, "N": inner},
        nbytes=4 * (3 * hidden * inner + 2 * rows * hidden),
        operations=rows * inner * (6 * hidden + 5),
    )


SPEC = OpSpec(
    name="mlp",
    summary="Gated feed-forward block: two products, SwiGLU, one product.",
    scalars=NoScalars,
    operands=(*WEIGHTS, Operand("x", ("T", "hidden")), Operand("out", ("T", "hidden"), role="output")),
    make_case=make_case,
    dims={"T": (0, 6), "hidden": (1, 40), "N": (1, 60)},
    compose=compose,
    bench=(_bench(1), _bench(8), _bench(512)),
)
