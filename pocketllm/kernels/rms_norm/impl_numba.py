"""RMSNorm in Numba: squares are summed in eight lanes, then across them, whatever else is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import LANES, broadcast, fma, load_f32, mul, store_f32, sum_lanes

ALONE = 1 << 15
"""Numbers below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """The weight with its offset, in float32."""
    weight = call.weights["weight"].astype(np.float32) + np.float32(call.scalars.weight_offset)
    eps = float(call.scalars.eps)
    kernel = KERNEL.request()

    def rms_norm(
        x: npt.NDArray[Any], residual: npt.NDArray[Any] | None = None, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        out = np.empty_like(x) if out is None else out
        rows = x.reshape(-1, x.shape[-1])
        kernel(
            rows, rows[:0] if residual is None else residual.reshape(rows.shape), weight, eps, out.reshape(rows.shape)
        )
        return out

    return rms_norm


def _rms_norm(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    if x.size < ALONE:
        for row in range(len(x)):
            normalize_row(x, residual, weight, eps, out, row)
    else:
        for row in prange(len(x)):
            normalize_row(x, residual, weight, eps, out, np.int64(row))


@device
def normalize_row(x: Any, residual: Any, weight: Any, eps: Any, out: Any, row: Any) -> None:
    """One row of `out`. A `residual` that has rows takes x first, and is what is normalised."""
    columns = x.shape[1]
    for column in range(columns):
        out[row, column] = x[row, column]
    if len(residual) > 0:
        for column in range(columns):
            out[row, column] += residual[row, column]
            residual[row, column] = out[row, column]
    start, whole = row * columns, columns // LANES * LANES
    squares = broadcast(np.float32(0.0))
    for column in range(0, whole, LANES):
        vector = load_f32(out, start + column)
        squares = fma(vector, vector, squares)
    total = sum_lanes(squares)
    for column in range(whole, columns):
        total = fma(out[row, column], out[row, column], total)
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / columns + eps))
    for column in range(0, whole, LANES):
        vector = mul(mul(load_f32(out, start + column), broadcast(scale)), load_f32(weight, column))
        store_f32(out, start + column, vector)
    for column in range(whole, columns):
        out[row, column] = out[row, column] * scale * weight[column]


KERNEL = Kernel(
    _rms_norm,
    readonly(types.float32, 2),
    array(types.float32, 2),
    readonly(types.float32, 1),
    types.float64,
    array(types.float32, 2),
    parallel=True,
)
