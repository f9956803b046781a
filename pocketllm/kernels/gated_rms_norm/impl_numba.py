"""Gated RMSNorm in Numba: a row is normalised as in `rms_norm`, then gated where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.rms_norm.impl_numba import normalize_row
from pocketllm.kernels.simd_numba import LANES, broadcast, load_f32, mul, sigmoid, store_f32

ALONE = 1 << 14
"""Numbers below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix but the weight."""
    weight = call.weights["weight"]
    eps = float(call.scalars.eps)
    kernel = KERNEL.request()

    def gated_rms_norm(
        x: npt.NDArray[Any], gate: npt.NDArray[Any], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        out = np.empty_like(x) if out is None else out
        rows = x.reshape(-1, x.shape[-1])
        kernel(rows, gate.reshape(rows.shape), weight, eps, out.reshape(rows.shape))
        return out

    return gated_rms_norm


def _gated_rms_norm(x: Any, gate: Any, weight: Any, eps: Any, out: Any) -> None:
    if x.size < ALONE:
        for row in range(len(x)):
            normalize_and_gate_row(x, gate, weight, eps, out, row)
    else:
        for row in prange(len(x)):
            normalize_and_gate_row(x, gate, weight, eps, out, np.int64(row))


@device
def normalize_and_gate_row(x: Any, gate: Any, weight: Any, eps: Any, out: Any, row: Any) -> None:
    """One row of `out`."""
    normalize_row(x, out[:0], weight, eps, out, row)
    columns = x.shape[1]
    start, whole = row * columns, columns // LANES * LANES
    one = broadcast(np.float32(1.0))
    for column in range(0, whole, LANES):
        z = load_f32(gate, start + column)
        store_f32(out, start + column, mul(load_f32(out, start + column), mul(z, sigmoid(z, one))))
    for column in range(whole, columns):
        z = gate[row, column]
        out[row, column] = mul(out[row, column], mul(z, sigmoid(z, np.float32(1.0))))


KERNEL = Kernel(
    _gated_rms_norm,
    readonly(types.float32, 2),
    readonly(types.float32, 2),
    readonly(types.float32, 1),
    types.float64,
    array(types.float32, 2),
    parallel=True,
)
