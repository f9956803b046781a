"""The tiles in which CUDA C computes matrix products: one shape for few rows, one for many, with the same bits."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128
"""Of a block."""

_FEW = 8
"""Rows up to which reading the weight takes longer than computing."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes.

    Attributes:
        kernel: the kernel's name, with rows and columns as its last template arguments.
        rows, columns: of the result.
    """

    kernel: str
    rows: int
    columns: int

    def grid(self, rows: int, columns: int) -> list[int]:
        """The blocks for a result of this size."""
        return [-(-columns // self.columns), -(-rows // self.rows)]


TILES = (Tile("few_rows", 4, THREADS // 32), Tile("many_rows", 32, 64))


def tile_for(rows: int) -> Tile:
    """The one for a result of so many rows."""
    few, many = TILES
    return few if rows <= _FEW else many
