"""Gated RMSNorm: rows scaled to unit root mean square and by a weight, then gated; norm first, gate second.

It is an op beside `rms_norm` and no option of it: no layer adds to a residual and gates in one go.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Yang et al., "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, Operand, OpSpec
from pocketllm.kernels.rms_norm.spec import make_eps
from pocketllm.kernels.sigmoid_gate.spec import sigmoid


@dataclass(frozen=True, slots=True)
class GatedRmsNorm:
    """Scalars of the op.

    Attributes:
        eps: added to the mean square.
    """

    eps: float


def normalized(s: GatedRmsNorm, weight: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float64."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + s.eps)
    y: npt.NDArray[np.float64] = wide * scale * weight
    return y


def reference(
    s: GatedRmsNorm, *, weight: npt.NDArray[Any], x: npt.NDArray[Any], gate: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """``out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)`` with ``silu(z) = z * sigmoid(z)``."""
    out: npt.NDArray[Any] = (normalized(s, weight, x) * gate * sigmoid(gate)).astype(x.dtype)
    return out


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Rows of mixed magnitude, now and then all zero, with or without heads (`heads` 0); gates far into both tails."""
    heads = (dims["heads"],) if dims["heads"] else ()
    shape = (dims["rows"], *heads, dims["n"])
    magnitude = 10.0 ** rng.uniform(-6, 4, size=(*shape[:-1], 1)) * rng.integers(0, 2, size=(*shape[:-1], 1))
    x = (rng.standard_normal(shape) * magnitude).astype(np.float32)
    gate = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 2, size=shape)).astype(np.float32)
    weight = rng.standard_normal(dims["n"]).astype(np.float32)
    return Case(GatedRmsNorm(make_eps(rng)), {"weight": weight}, {"x": x, "gate": gate})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """As `rms_norm`'s, half of (n + 1)u and five operations, and eight more for the silu and its product.

    The result is stored and the reference rounded. Where exp(-gate) overflows float32 the silu underflows to zero,
    which is off by less than the smallest normal number times gate.
    """
    x, gate = case.arrays["x"], case.arrays["gate"]
    scaled = np.abs(normalized(case.scalars, case.weights["weight"], x))
    out = scaled * np.abs(gate) * sigmoid(gate)
    smallest = float(np.finfo(np.float32).tiny)
    relative = ACCUMULATION_ROUNDOFF * ((x.shape[-1] + 1) / 2 + 13) + 2 * u
    return {"out": relative * out + smallest * (1 + scaled) * (1 + np.abs(gate.astype(np.float64)))}


SPEC = OpSpec(
    name="gated_rms_norm",
    summary="RMSNorm over the last dimension, times the silu of a gate.",
    scalars=GatedRmsNorm,
    operands=(
        Operand("weight", ("n",), dtype="float32", role="weight"),
        Operand("x", ("...", "n")),
        Operand("gate", ("...", "n")),
        Operand("out", ("...", "n"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"rows": (0, 9), "heads": (0, 3), "n": (1, 300)},
    error_bound=error_bound,
    bench=(
        BenchShape({"rows": 1, "heads": 32, "n": 128}, nbytes=(3 * 32 + 1) * 128 * 4, operations=9 * 32 * 128),
        BenchShape(
            {"rows": 512, "heads": 32, "n": 128}, nbytes=(3 * 512 * 32 + 1) * 128 * 4, operations=9 * 512 * 32 * 128
        ),
    ),
)
