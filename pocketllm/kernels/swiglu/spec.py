"""SwiGLU: the gated activation between a feed-forward block's two products.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, NoScalars, Operand, OpSpec


def reference(s: NoScalars, *, gate: npt.NDArray[Any], up: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``out = silu(gate) * up`` with ``silu(z) = z / (1 + exp(-z))``."""
    wide = gate.astype(np.float64)
    # exp of a negative number only, so that nothing overflows.
    decay = np.exp(-np.abs(wide))
    sigmoid = np.where(wide >= 0, 1.0, decay) / (1.0 + decay)
    out: npt.NDArray[Any] = (wide * sigmoid * up).astype(gate.dtype)
    return out


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Gates of mixed magnitude, far into both tails."""
    shape = (dims["T"], dims["n"])
    gate = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 2, size=shape)
    return Case(NoScalars(), {}, {"gate": gate.astype(np.float32), "up": rng.standard_normal(shape, dtype=np.float32)})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """An exponential of two units, four more operations; silu, the product and the reference are stored.

    Where exp(-gate) overflows float32 the result underflows to zero, which is off by less than the smallest normal
    number times gate and up.
    """
    gate, up = (np.abs(case.arrays[name].astype(np.float64)) for name in ("gate", "up"))
    out = np.abs(reference(NoScalars(), **case.arrays).astype(np.float64))
    smallest = float(np.finfo(np.float32).tiny)
    return {"out": 8 * ACCUMULATION_ROUNDOFF * out + 3 * u * out + smallest * (1 + gate) * (1 + up)}


SPEC = OpSpec(
    name="swiglu",
    summary="silu(gate) times up.",
    scalars=NoScalars,
    operands=(
        Operand("gate", ("T", "n")),
        Operand("up", ("T", "n")),
        Operand("out", ("T", "n"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "n": (1, 300)},
    error_bound=error_bound,
    bench=(
        BenchShape({"T": 1, "n": 1536}, nbytes=3 * 1536 * 4, operations=5 * 1536),
        BenchShape({"T": 512, "n": 4096}, nbytes=3 * 512 * 4096 * 4, operations=5 * 512 * 4096),
    ),
)
