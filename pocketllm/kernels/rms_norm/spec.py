"""RMSNorm: rows scaled to unit root mean square, then by a learned weight.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Scalars of the op.

    Attributes:
        eps: added to the mean square.
        weight_offset: added to the weight; 1.0 for families that store it as a difference from one.
    """

    eps: float
    weight_offset: float = 0.0


def reference(
    s: RmsNorm,
    *,
    weight: npt.NDArray[Any],
    x: npt.NDArray[Any],
    residual: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """``y = x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension.

    With `residual`, ``residual += x`` first, and the sum (as rounded into `residual`) is what is normalised.
    """
    if residual is not None:
        residual += x
        x = residual
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + s.eps)
    out: npt.NDArray[Any] = (wide * scale * (weight.astype(np.float64) + s.weight_offset)).astype(x.dtype)
    return out


def make_eps(rng: np.random.Generator) -> float:
    """One that models have, or one that shows in every result."""
    return float(rng.choice([1e-6, 1e-5, 1e-2]))


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Rows of mixed magnitude, now and then all zero, with or without heads (`heads` 0) and a residual."""
    heads = (dims["heads"],) if dims["heads"] else ()
    shape = (dims["rows"], *heads, dims["n"])
    present = rng.integers(0, 4, size=(*shape[:-1], 1)) > 0
    magnitude = 10.0 ** rng.uniform(-6, 4, size=present.shape) * present
    x = (rng.standard_normal(shape) * magnitude).astype(np.float32)
    arrays: dict[str, npt.NDArray[Any]] = {"x": x}
    if rng.integers(2):
        arrays["residual"] = rng.standard_normal(shape).astype(np.float32)
    weight = rng.standard_normal(dims["n"]).astype(np.float32)
    return Case(RmsNorm(make_eps(rng), weight_offset=float(rng.integers(2))), {"weight": weight}, arrays)


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """The sum of n squares errs by at most (n + 1)u, its root by half of that; three products and roots follow.

    The result is stored and the reference rounded. With a residual the sum that is normalised may be stored
    differently than in the reference, by one rounding in each.
    """
    x = case.arrays["x"].astype(np.float64)
    residual = case.arrays.get("residual")
    total = x if residual is None else x + residual
    y = np.abs(reference(case.scalars, weight=case.weights["weight"], x=total))
    # Where weight and offset nearly cancel, the rounding of their sum counts relative to the larger part.
    weight = np.abs(case.weights["weight"].astype(np.float64)) + case.scalars.weight_offset
    scaled = np.abs(total) / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + case.scalars.eps)
    bounds = {"out": ACCUMULATION_ROUNDOFF * (((x.shape[-1] + 1) / 2 + 5) * y + 2 * scaled * weight) + 2 * u * y}
    if residual is not None:
        bounds["residual"] = 2 * u * np.abs(total)
        # The root mean square moves by as much as the numbers under it at most.
        bounds["out"] += 4 * u * y
    return bounds


SPEC = OpSpec(
    name="rms_norm",
    summary="RMSNorm over the last dimension, after adding the input to a residual where one is given.",
    scalars=RmsNorm,
    operands=(
        Operand("weight", ("n",), dtype="float32", role="weight"),
        Operand("x", ("...", "n")),
        Operand("residual", ("...", "n"), role="inout", optional=True),
        Operand("out", ("...", "n"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"rows": (0, 9), "heads": (0, 3), "n": (1, 300)},
    error_bound=error_bound,
    bench=(
        BenchShape({"rows": 1, "heads": 0, "n": 576}, nbytes=3 * 576 * 4, operations=4 * 576),
        BenchShape({"rows": 512, "heads": 0, "n": 4096}, nbytes=(2 * 512 + 1) * 4096 * 4, operations=4 * 512 * 4096),
    ),
)
