"""A sigmoid gate: how much of each number of an attention's result enters its output projection.

Source: Qiu et al., "Gated Attention for Large Language Models", 2025.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, NoScalars, Operand, OpSpec


def sigmoid(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``1 / (1 + exp(-x))`` in float64; exp of a negative number only, so that nothing overflows."""
    wide = x.astype(np.float64)
    decay = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1.0, decay) / (1.0 + decay)


def reference(s: NoScalars, *, x: npt.NDArray[Any], gate: npt.NDArray[Any]) -> None:
    """``x *= sigmoid(gate)``."""
    x[...] = x * sigmoid(gate)


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Gates of mixed magnitude, far into both tails, with or without heads (`heads` 0)."""
    heads = (dims["heads"],) if dims["heads"] else ()
    shape = (dims["T"], *heads, dims["n"])
    gate = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 2, size=shape)
    return Case(NoScalars(), {}, {"x": rng.standard_normal(shape, dtype=np.float32), "gate": gate.astype(np.float32)})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """An exponential of two units and three more operations; the product and the reference are stored.

    Where exp(-gate) overflows float32 the sigmoid underflows to zero, which is off by less than the smallest normal
    number.
    """
    x = np.abs(case.arrays["x"].astype(np.float64))
    out = x * sigmoid(case.arrays["gate"])
    return {"x": 7 * ACCUMULATION_ROUNDOFF * out + 2 * u * out + float(np.finfo(np.float32).tiny) * (1 + x)}


SPEC = OpSpec(
    name="sigmoid_gate",
    summary="Multiplies the input by the sigmoid of a gate in place.",
    scalars=NoScalars,
    operands=(Operand("x", ("...", "n"), role="inout"), Operand("gate", ("...", "n"))),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "heads": (0, 3), "n": (1, 300)},
    error_bound=error_bound,
    bench=(
        BenchShape({"T": 1, "heads": 0, "n": 4096}, nbytes=3 * 4096 * 4, operations=5 * 4096),
        BenchShape({"T": 512, "heads": 0, "n": 4096}, nbytes=3 * 512 * 4096 * 4, operations=5 * 512 * 4096),
    ),
)
