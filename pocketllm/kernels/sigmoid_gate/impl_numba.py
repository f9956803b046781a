"""The sigmoid gate in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import LANES, broadcast, load_f32, mul, sigmoid, store_f32

ALONE = 1 << 14
"""Numbers below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel = KERNEL.request()

    def sigmoid_gate(x: npt.NDArray[Any], gate: npt.NDArray[Any]) -> None:
        rows = x.reshape(-1, x.shape[-1])
        kernel(rows, gate.reshape(rows.shape))

    return sigmoid_gate


def _sigmoid_gate(x: Any, gate: Any) -> None:
    if x.size < ALONE:
        for row in range(len(x)):
            gate_row(x, gate, row)
    else:
        for row in prange(len(x)):
            gate_row(x, gate, np.int64(row))


@device
def gate_row(x: Any, gate: Any, row: Any) -> None:
    """One row of `x`, in place."""
    columns = x.shape[1]
    start, whole = row * columns, columns // LANES * LANES
    one = broadcast(np.float32(1.0))
    for column in range(0, whole, LANES):
        share = sigmoid(load_f32(gate, start + column), one)
        store_f32(x, start + column, mul(load_f32(x, start + column), share))
    for column in range(whole, columns):
        x[row, column] = mul(x[row, column], sigmoid(gate[row, column], np.float32(1.0)))


KERNEL = Kernel(_sigmoid_gate, array(types.float32, 2), readonly(types.float32, 2), parallel=True)
