"""Addition in place in Numba."""

from __future__ import annotations

from typing import Any

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

    def add(residual: npt.NDArray[Any], x: npt.NDArray[Any]) -> None:
        kernel(residual, x)

    return add


def _add(residual: Any, x: Any) -> None:
    for row in range(residual.shape[0]):
        for column in range(residual.shape[1]):
            residual[row, column] += x[row, column]


KERNEL = Kernel(_add, array(types.float32, 2), readonly(types.float32, 2))
