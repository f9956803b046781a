"""Key and value cache writes in Numba."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from numba import types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, readonly


def supports(call: OpCall) -> str | None:
    """Caches in float32."""
    return None if call.cache_dtype == "float32" else f"the cache is {call.cache_dtype}, not float32"


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel = KERNEL.request()

    def kv_write(
        key: npt.NDArray[Any],
        value: npt.NDArray[Any],
        key_cache: npt.NDArray[Any],
        value_cache: npt.NDArray[Any],
        slots: npt.NDArray[Any],
    ) -> None:
        kernel(key, value, key_cache, value_cache, slots)

    return kv_write


def _kv_write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    block_size = key_cache.shape[1]
    for row in range(len(slots)):
        block, offset = divmod(slots[row], block_size)
        for head in range(key.shape[1]):
            for index in range(key.shape[2]):
                key_cache[block, offset, head, index] = key[row, head, index]
                value_cache[block, offset, head, index] = value[row, head, index]


KERNEL = Kernel(
    _kv_write,
    readonly(types.float32, 3),
    readonly(types.float32, 3),
    array(types.float32, 4),
    array(types.float32, 4),
    readonly(types.int64, 1),
)
