"""Selection of rows in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, readonly


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel = KERNEL.request()

    def take_rows(x: npt.NDArray[Any], rows: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        out = np.empty((len(rows), x.shape[1]), dtype=np.float32) if out is None else out
        kernel(x, rows, out)
        return out

    return take_rows


def _take_rows(x: Any, rows: Any, out: Any) -> None:
    for row in range(len(rows)):
        for column in range(x.shape[1]):
            out[row, column] = x[rows[row], column]


KERNEL = Kernel(_take_rows, readonly(types.float32, 2), readonly(types.int64, 1), array(types.float32, 2))
