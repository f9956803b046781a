"""SwiGLU in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import LANES, add, broadcast, div, exp, load_f32, mul, store_f32, sub

ALONE = 1 << 14
"""Numbers below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel = KERNEL.request()

    def swiglu(gate: npt.NDArray[Any], up: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        out = np.empty_like(gate) if out is None else out
        kernel(gate, up, out)
        return out

    return swiglu


def _swiglu(gate: Any, up: Any, out: Any) -> None:
    if gate.size < ALONE:
        for row in range(len(gate)):
            swiglu_row(gate, up, out, row)
    else:
        for row in prange(len(gate)):
            swiglu_row(gate, up, out, np.int64(row))


@device
def swiglu_row(gate: Any, up: Any, out: Any, row: Any) -> None:
    """One row of `out`."""
    columns = gate.shape[1]
    start, whole = row * columns, columns // LANES * LANES
    zero, one = broadcast(np.float32(0.0)), broadcast(np.float32(1.0))
    for column in range(0, whole, LANES):
        z = load_f32(gate, start + column)
        silu = div(z, add(one, exp(sub(zero, z))))
        store_f32(out, start + column, mul(silu, load_f32(up, start + column)))
    for column in range(whole, columns):
        z = gate[row, column]
        silu = div(z, add(np.float32(1.0), exp(sub(np.float32(0.0), z))))
        out[row, column] = mul(silu, up[row, column])


KERNEL = Kernel(_swiglu, readonly(types.float32, 2), readonly(types.float32, 2), array(types.float32, 2), parallel=True)
