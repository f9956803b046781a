"""Language model head: the logits of the rows that need them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pocketllm.kernels.contract import Array, Arrays, BenchShape, BoundOp, Case, Dims, Operand, OpSpec, OpTable
from pocketllm.kernels.linear.spec import make_weights as make_linear
from pocketllm.kernels.rms_norm.spec import make_eps


@dataclass(frozen=True, slots=True)
class LmHead:
    """Scalars of the op.

    Attributes:
        eps: of the norm.
        norm_offset: added to the norm's weight.
    """

    eps: float
    norm_offset: float = 0.0


def compose(ops: OpTable, s: LmHead, weights: Arrays) -> BoundOp:
    """``linear(norm(x[rows]))``."""
    take_rows = ops.bind("take_rows")
    norm = ops.bind("rms_norm", {"weight": weights["norm"]}, eps=s.eps, weight_offset=s.norm_offset)
    project = ops.bind("linear", {"weight": weights["weight"], "bias": weights.get("bias")})

    def lm_head(x: Array, rows: Array, logits: Array = None) -> Array:
        return project(norm(take_rows(x, rows)), out=logits)

    return lm_head


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Rows in any order, some of them twice."""
    made = make_linear(rng, "weight", (dims["V"], dims["hidden"]), bias=bool(rng.integers(2)))
    weights = {name.removeprefix("weight_"): array for name, array in made.items()}
    weights["norm"] = rng.uniform(0.5, 1.5, size=dims["hidden"]).astype(np.float32)
    x = rng.standard_normal((dims["T"], dims["hidden"]), dtype=np.float32)
    rows = rng.integers(0, dims["T"], size=dims["R"])
    return Case(LmHead(make_eps(rng), norm_offset=float(rng.integers(2))), weights, {"x": x, "rows": rows})


def _bench(rows: int) -> BenchShape:
    hidden, vocabulary = 576, 49152
    return BenchShape(
        {"T": rows, "R": rows, "V": vocabulary, "hidden": hidden},
        nbytes=4 * (vocabulary * hidden + rows * (hidden + vocabulary)),
        operations=2 * rows * vocabulary * hidden,
    )


SPEC = OpSpec(
    name="lm_head",
    summary="Logits of the chosen rows: norm, then a product with the vocabulary's weight.",
    scalars=LmHead,
    operands=(
        Operand("norm", ("hidden",), dtype="float32", role="weight"),
        Operand("weight", ("V", "hidden"), dtype="weight", role="weight"),
        Operand("bias", ("V",), dtype="float32", role="weight", optional=True),
        Operand("x", ("T", "hidden")),
        Operand("rows", ("R",), dtype="int64"),
        Operand("logits", ("R", "V"), role="output"),
    ),
    make_case=make_case,
    dims={"T": (1, 6), "R": (0, 6), "V": (1, 60), "hidden": (1, 40)},
    compose=compose,
    bench=(_bench(1), _bench(8)),
)
