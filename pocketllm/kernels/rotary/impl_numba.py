"""Rotary position embedding in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly

ALONE = 1 << 15
"""Numbers below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the pairing."""
    interleaved: bool = call.scalars.interleaved
    kernel = KERNEL.request()

    def rotary(x: npt.NDArray[Any], angles: npt.NDArray[Any]) -> None:
        kernel(x, angles, interleaved)

    return rotary


def _rotary(x: Any, angles: Any, interleaved: Any) -> None:
    if x.size < ALONE:
        for row in range(len(x)):
            rotate_row(x, angles, interleaved, row)
    else:
        for row in prange(len(x)):
            rotate_row(x, angles, interleaved, np.int64(row))


@device
def rotate_row(x: Any, angles: Any, interleaved: Any, row: Any) -> None:
    """Every head of one row."""
    pairs = angles.shape[2]
    step, apart = (2, 1) if interleaved else (1, pairs)
    for head in range(x.shape[1]):
        for pair in range(pairs):
            at = pair * step
            cos, sin = angles[row, 0, pair], angles[row, 1, pair]
            first, second = x[row, head, at], x[row, head, at + apart]
            x[row, head, at] = first * cos - second * sin
            x[row, head, at + apart] = second * cos + first * sin


KERNEL = Kernel(_rotary, array(types.float32, 3), readonly(types.float32, 3), types.boolean, parallel=True)
