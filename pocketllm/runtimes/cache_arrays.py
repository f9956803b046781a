"""The arrays behind a model's caches: blocks of entries that sequences share out, and slots of recurrent states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal

import numpy as np

from pocketllm.kernels.contract import Array
from pocketllm.models.family import CacheSpec, LayerCaches, PagedCache
from pocketllm.runtimes.arrays import ArrayLibrary

Kind = Literal["block", "state"]


class CacheArrays:
    """Every cache of every layer. The first dimension of a paged cache counts blocks, that of a state cache slots.

    Attributes:
        layers: each layer's arrays by the name that its ops know them by; none before `allocate`.
        nbytes: of one block, and of one slot, over all layers.
    """

    def __init__(self, layout: Sequence[LayerCaches], block_size: int, arrays: ArrayLibrary) -> None:
        self.layers: list[dict[str, Array]] = []
        self._layout = layout
        self._block_size = block_size
        self._arrays = arrays
        self.nbytes: dict[Kind, int] = {kind: self._nbytes(kind) for kind in ("block", "state")}

    def allocate(self, blocks: int, states: int) -> None:
        """Make room for so many blocks and slots; what was there before is dropped."""
        self.layers = []
        count: dict[Kind, int] = {"block": blocks, "state": states}
        self.layers = [
            {
                name: self._arrays.zeros((count[_kind(cache)], *self._shape(cache)), cache.dtype)
                for name, cache in layer.items()
            }
            for layer in self._layout
        ]

    def drop(self) -> None:
        """Give the memory back."""
        self.layers = []

    def copy(self, kind: Kind, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks or slots to others."""
        for array, _ in self._each(kind):
            self._arrays.copy_rows(array, source, target)

    def read(self, kind: Kind, rows: Sequence[int]) -> bytes:
        """The contents of blocks or slots, one after another; of each, layer by layer and cache by cache."""
        contents = np.empty((len(rows), self.nbytes[kind]), dtype=np.uint8)
        for array, part in self._each(kind):
            read = np.frombuffer(self._arrays.read_rows(array, rows), dtype=np.uint8)
            contents[:, part] = read.reshape(len(rows), part.stop - part.start)
        return contents.tobytes()

    def write(self, kind: Kind, rows: Sequence[int], data: bytes) -> None:
        """Put such contents into blocks or slots; ValueError when the size does not fit."""
        wanted = self.nbytes[kind] * len(rows)
        if len(data) != wanted:
            raise ValueError(f"{len(rows)} {kind}s hold {wanted} bytes; {len(data)} were given")
        contents = np.frombuffer(data, dtype=np.uint8).reshape(len(rows), self.nbytes[kind])
        for array, part in self._each(kind):
            self._arrays.write_rows(array, rows, contents[:, part].tobytes())

    def _each(self, kind: Kind) -> Iterator[tuple[Array, slice]]:
        """The arrays of that kind, and which bytes of a block or slot are each one's."""
        start = 0
        for layer, layout in zip(self.layers, self._layout, strict=True):
            for name, cache in layout.items():
                if _kind(cache) == kind:
                    end = start + self._row_nbytes(cache)
                    yield layer[name], slice(start, end)
                    start = end

    def _nbytes(self, kind: Kind) -> int:
        caches = (cache for layer in self._layout for cache in layer.values())
        return sum(self._row_nbytes(cache) for cache in caches if _kind(cache) == kind)

    def _row_nbytes(self, cache: CacheSpec) -> int:
        return prod(self._shape(cache)) * self._arrays.itemsize(cache.dtype)

    def _shape(self, cache: CacheSpec) -> tuple[int, ...]:
        return (self._block_size, *cache.entry_shape) if isinstance(cache, PagedCache) else cache.shape


def _kind(cache: CacheSpec) -> Kind:
    return "block" if isinstance(cache, PagedCache) else "state"
