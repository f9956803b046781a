"""CuPy's arrays on a GPU; NumPy's where CUDA C is emulated.

Rows are copied whole, one by one, which takes none of CuPy's own kernels: those are compiled when they are first used,
and need headers of CUDA that are not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pocketllm.kernels.contract import Array
from pocketllm.kernels.jit.cuda_source import storage_dtype
from pocketllm.kernels.jit.toolchain_cupy import array_module
from pocketllm.runtimes.arrays import ArrayLibrary, Host


class CupyArrays(ArrayLibrary):
    """Arrays on one device, which has to be the current one."""

    def __init__(self, device: str, dtype: str) -> None:
        self._on_host = device == "cpu"
        self._library: Any = array_module(device)
        self._activation = dtype

    def itemsize(self, dtype: str) -> int:
        """See `ArrayLibrary.itemsize`."""
        return self._dtype(dtype).itemsize

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """See `ArrayLibrary.zeros`."""
        return self._library.zeros(tuple(shape), dtype=self._dtype(dtype))

    def from_host(self, array: Host) -> Array:
        """See `ArrayLibrary.from_host`: a copy on either side."""
        return self._library.array(np.ascontiguousarray(array))

    def to_host(self, array: Array) -> Host:
        """See `ArrayLibrary.to_host`."""
        host: Host = array if self._on_host else array.get()
        return host

    def read_rows(self, array: Array, rows: Sequence[int]) -> bytes:
        """See `ArrayLibrary.read_rows`."""
        return self.to_host(self._gathered(array, rows)).tobytes()

    def write_rows(self, array: Array, rows: Sequence[int], data: bytes) -> None:
        """See `ArrayLibrary.write_rows`."""
        values = np.frombuffer(data, dtype=array.dtype).reshape(len(rows), *array.shape[1:])
        _scatter(self.from_host(values), array, rows)

    def copy_rows(self, array: Array, source: Sequence[int], target: Sequence[int]) -> None:
        """See `ArrayLibrary.copy_rows`."""
        _scatter(self._gathered(array, source), array, target)

    def _gathered(self, array: Array, rows: Sequence[int]) -> Array:
        gathered = self._library.empty((len(rows), *array.shape[1:]), dtype=array.dtype)
        for index, row in enumerate(rows):
            gathered[index] = array[row]
        return gathered

    def _dtype(self, dtype: str) -> np.dtype[Any]:
        return storage_dtype(self._activation if dtype == "activation" else dtype)


def _scatter(values: Array, array: Array, rows: Sequence[int]) -> None:
    for index, row in enumerate(rows):
        array[row] = values[index]
