"""Addition in place: how a block's result enters the residual stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import BenchShape, Case, Dims, NoScalars, Operand, OpSpec


def reference(s: NoScalars, *, residual: npt.NDArray[Any], x: npt.NDArray[Any]) -> None:
    """``residual += x``; a float sum of two numbers is rounded once."""
    residual += x


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Two normal matrices."""
    shape = (dims["T"], dims["n"])
    arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name in ("residual", "x")}
    return Case(NoScalars(), {}, arrays)


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """One rounding here and one in the reference."""
    total = case.arrays["residual"].astype(np.float64) + case.arrays["x"]
    return {"residual": 2 * u * np.abs(total)}


SPEC = OpSpec(
    name="add",
    summary="Adds the input to a residual in place.",
    scalars=NoScalars,
    operands=(Operand("residual", ("T", "n"), role="inout"), Operand("x", ("T", "n"))),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "n": (1, 300)},
    error_bound=error_bound,
    bench=(
        BenchShape({"T": 1, "n": 576}, nbytes=3 * 576 * 4, operations=576),
        BenchShape({"T": 512, "n": 4096}, nbytes=3 * 512 * 4096 * 4, operations=512 * 4096),
    ),
)
