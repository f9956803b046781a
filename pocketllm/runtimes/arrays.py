"""The little that a runtime asks of an array library: room, copies to and from the host, and blocks by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import Array

Host = npt.NDArray[Any]


class ArrayLibrary(ABC):
    """Arrays of one library, on one device, with one activation dtype.

    Attributes:
        itemsize: bytes of an activation.
    """

    itemsize: int

    @abstractmethod
    def zeros(self, shape: Sequence[int]) -> Array:
        """Activations, all zero."""

    @abstractmethod
    def from_host(self, array: Host) -> Array:
        """A copy where the library computes; on the host it may be the array itself."""

    @abstractmethod
    def to_host(self, array: Array) -> Host:
        """A copy on the host; there it may be the array itself."""

    @abstractmethod
    def read_blocks(self, array: Array, blocks: Sequence[int]) -> bytes:
        """The contents of some rows of the first dimension, in the order given."""

    @abstractmethod
    def write_blocks(self, array: Array, blocks: Sequence[int], data: bytes) -> None:
        """Put such contents into some rows of the first dimension."""

    @abstractmethod
    def copy_blocks(self, array: Array, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy rows of the first dimension to others."""


class NumpyArrays(ArrayLibrary):
    """NumPy arrays in float32."""

    itemsize = 4

    def zeros(self, shape: Sequence[int]) -> Host:
        """See `ArrayLibrary.zeros`."""
        return np.zeros(tuple(shape), dtype=np.float32)

    def from_host(self, array: Host) -> Host:
        """See `ArrayLibrary.from_host`."""
        return np.ascontiguousarray(array)

    def to_host(self, array: Host) -> Host:
        """See `ArrayLibrary.to_host`."""
        return array

    def read_blocks(self, array: Host, blocks: Sequence[int]) -> bytes:
        """See `ArrayLibrary.read_blocks`."""
        return array[list(blocks)].tobytes()

    def write_blocks(self, array: Host, blocks: Sequence[int], data: bytes) -> None:
        """See `ArrayLibrary.write_blocks`."""
        array[list(blocks)] = np.frombuffer(data, dtype=array.dtype).reshape(len(blocks), *array.shape[1:])

    def copy_blocks(self, array: Host, source: Sequence[int], target: Sequence[int]) -> None:
        """See `ArrayLibrary.copy_blocks`."""
        array[list(target)] = array[list(source)]
