"""The little that a runtime asks of an array library: room, copies to and from the host, and rows by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import Array

Host = npt.NDArray[Any]


class ArrayLibrary(ABC):
    """Arrays of one library, on one device, with one activation dtype. A dtype is ``activation`` or a NumPy name."""

    @abstractmethod
    def itemsize(self, dtype: str) -> int:
        """Bytes of a number."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """An array of zeros."""

    @abstractmethod
    def from_host(self, array: Host) -> Array:
        """A copy where the library computes; on the host it may be the array itself."""

    @abstractmethod
    def to_host(self, array: Array) -> Host:
        """A copy on the host; there it may be the array itself."""

    @abstractmethod
    def read_rows(self, array: Array, rows: Sequence[int]) -> bytes:
        """The contents of some rows of the first dimension, in the order given."""

    @abstractmethod
    def write_rows(self, array: Array, rows: Sequence[int], data: bytes) -> None:
        """Put such contents into some rows of the first dimension."""

    @abstractmethod
    def copy_rows(self, array: Array, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy rows of the first dimension to others."""


class NumpyArrays(ArrayLibrary):
    """NumPy arrays with activations in float32."""

    def itemsize(self, dtype: str) -> int:
        """See `ArrayLibrary.itemsize`."""
        return self._dtype(dtype).itemsize

    def zeros(self, shape: Sequence[int], dtype: str) -> Host:
        """See `ArrayLibrary.zeros`."""
        return np.zeros(tuple(shape), dtype=self._dtype(dtype))

    def _dtype(self, dtype: str) -> np.dtype[Any]:
        return np.dtype("float32" if dtype == "activation" else dtype)

    def from_host(self, array: Host) -> Host:
        """See `ArrayLibrary.from_host`."""
        return np.ascontiguousarray(array)

    def to_host(self, array: Host) -> Host:
        """See `ArrayLibrary.to_host`."""
        return array

    def read_rows(self, array: Host, rows: Sequence[int]) -> bytes:
        """See `ArrayLibrary.read_rows`."""
        return array[list(rows)].tobytes()

    def write_rows(self, array: Host, rows: Sequence[int], data: bytes) -> None:
        """See `ArrayLibrary.write_rows`."""
        array[list(rows)] = np.frombuffer(data, dtype=array.dtype).reshape(len(rows), *array.shape[1:])

    def copy_rows(self, array: Host, source: Sequence[int], target: Sequence[int]) -> None:
        """See `ArrayLibrary.copy_rows`."""
        array[list(target)] = array[list(source)]
