"""Selection of rows: which positions of a step are carried on to the language model's head."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import BenchShape, Case, Dims, NoScalars, Operand, OpSpec


def reference(s: NoScalars, *, x: npt.NDArray[Any], rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``out[r] = x[rows[r]]``; a row may be taken any number of times."""
    out: npt.NDArray[Any] = x[rows]
    return out


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Rows in any order, some of them twice."""
    x = rng.standard_normal((dims["T"], dims["n"]), dtype=np.float32)
    return Case(NoScalars(), {}, {"x": x, "rows": rng.integers(0, dims["T"], size=dims["R"])})


SPEC = OpSpec(
    name="take_rows",
    summary="Copies the chosen rows of a matrix.",
    scalars=NoScalars,
    operands=(
        Operand("x", ("T", "n")),
        Operand("rows", ("R",), dtype="int64"),
        Operand("out", ("R", "n"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (1, 9), "R": (0, 9), "n": (1, 300)},
    bench=(BenchShape({"T": 512, "R": 8, "n": 4096}, nbytes=2 * 8 * 4096 * 4, operations=0),),
)
