"""The pool of KV blocks: who holds which is the sequences' matter, how many are free is known here."""

from __future__ import annotations


class BlockPool:
    """Fixed-size blocks of the KV cache, handed out and taken back.

    Attributes:
        total: blocks that there are.
        block_size: tokens of one block.
    """

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        # Taken from the end: the block freed last is used first, while its memory is warm.
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """So many blocks, or None, and nothing taken, when there are fewer."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks again; the caller must not use them any more."""
        self._free.extend(reversed(blocks))
