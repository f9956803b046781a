"""The engine's side of the caches: which blocks and state slots a sequence has, and which it need not compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from pocketllm.engine.pool import Pool
from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.engine.sequence import Sequence
from pocketllm.engine.states import NOWHERE, Snapshot, StateSlots


class CacheManager:
    """Paged blocks and slots of recurrent states, shared by content.

    A block that is full and computed can be found by the key of its tokens and all before them. A sequence that is
    admitted starts behind the blocks that are found for it; it shares these, and since only full blocks are shared and
    it starts at a block's end, nobody writes what another reads. Blocks that nobody holds any more stay until room is
    needed, the least recently used first and a prefix's end before its beginning.

    A model with recurrent states can go on only where a snapshot of them was left, so such a sequence starts behind the
    last block with one. Snapshots are left at the last block end within each prefill chunk; where a prompt parts from
    one before it, as behind a common system prompt; and, rolling, at the last block end that a reply has passed, where
    the next turn of its conversation finds it.

    At least one token of a sequence is always computed: the next is drawn from its logits.

    The engine's thread alone calls it.

    Attributes:
        block_size: tokens of one block.
        blocks: the runtime's blocks.
        states: the runtime's state slots.
        keys: how blocks are keyed; None turns sharing off.
    """

    def __init__(self, blocks: int, block_size: int, *, states: int = 0, keys: PrefixKeys | None = None) -> None:
        self.block_size = block_size
        self.states = StateSlots(states)
        self.blocks = Pool(blocks, evicted=self.states.forget)
        self.keys = keys

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def admit(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens of a sequence that has none, and state slots; what is found counts as computed.

        False, and nothing changed, when they are not free.
        """
        keys, found = self._found(sequence)
        missing = self.blocks_for(tokens) - len(found)
        if missing > self.blocks.free - sum(not self.blocks.held(block) for block in found):
            return False
        self.blocks.hold(found)
        if not self.states.begin(sequence.states, keys[len(found) - 1] if found else None):
            self.blocks.release(reversed(found))
            return False
        own = self.blocks.take(missing)
        assert own is not None, "so many were counted above"
        sequence.blocks = found + own
        sequence.shared = len(found)
        sequence.computed = len(found) * self.block_size
        sequence.states.branch = self._chained(keys) * self.block_size
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens of an admitted sequence; False, and nothing changed, when they are not free."""
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            taken = self.blocks.take(missing)
            if taken is None:
                return False
            sequence.blocks += taken
        return True

    def release(self, sequence: Sequence) -> None:
        """Take everything back; what others can find of it stays."""
        self.blocks.release(reversed(sequence.blocks))
        self.states.release(sequence.states)
        sequence.blocks = []
        sequence.shared = sequence.computed = 0

    def awaits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether one of those that run is about to compute the next block that is not found for the sequence."""
        keys, found = self._found(sequence)
        place = len(found)
        if place == len(keys):
            return False
        return any(
            other.shared <= place < len(other.block_keys) and other.block_keys[place] == keys[place]
            for other in running
            if other.shares_prefix
        )

    def plan(self, sequence: Sequence, rows: int) -> None:
        """A step computes the next `rows` tokens of the sequence: settle where their states are saved."""
        self.states.plan(sequence.states, rows, self._snapshots(sequence, rows))

    def reserve_drafts(self, sequence: Sequence, rows: int) -> list[int] | None:
        """A step computes `rows` rows of which all but the first are drafts: blocks for them, and a slot for each row.

        Returns the slots, -1 for models without states; None, and nothing changed, when blocks or slots are not free.
        """
        blocks = len(sequence.blocks)
        if not self.grow(sequence, sequence.computed + rows):
            return None
        if not self.states.plan_drafts(sequence.states, rows):
            self.blocks.release(sequence.blocks[blocks:])
            del sequence.blocks[blocks:]
            return None
        return [sequence.states.saves.get(row, NOWHERE) for row in range(rows)]

    def commit(self, sequence: Sequence, rows: int) -> None:
        """A step has computed the sequence, and its first `rows` rows count.

        They are tokens of the sequence. Blocks that are full now can be found from here on; what drafts beyond `rows`
        have left in blocks is overwritten before it is read.
        """
        snapshots = self._snapshots(sequence, rows)
        sequence.computed += rows
        if self.keys is not None and sequence.shares_prefix:
            full = sequence.computed // self.block_size
            keys = self._block_keys(sequence, full)
            for place in range(sequence.shared, full):
                sequence.blocks[place] = self.blocks.publish(sequence.blocks[place], keys[place])
            sequence.shared = full
        self.states.commit(sequence.states, rows, snapshots)

    def find(self, keys: list[bytes]) -> list[int]:
        """The blocks of the longest beginning of a chain of keys that a sequence could go on from."""
        count = self._chained(keys)
        if self.states.exist:
            while count and self.states.pool.find(keys[count - 1]) is None:
                count -= 1
        return [block for block in map(self.blocks.find, keys[:count]) if block is not None]

    def _chained(self, keys: list[bytes]) -> int:
        """How many of a chain's blocks are there, with or without states at their end."""
        # What can be found is a chain without gaps, so it can be halved.
        return bisect_left(keys, True, key=lambda key: self.blocks.find(key) is None)

    def _found(self, sequence: Sequence) -> tuple[list[bytes], list[int]]:
        """Keys of the blocks that it need not compute if they are found, and the blocks that are."""
        if self.keys is None or not sequence.shares_prefix:
            return [], []
        keys = self._block_keys(sequence, len(sequence.tokens) // self.block_size)
        keys = keys[: sequence.most_cached // self.block_size]
        return keys, self.find(keys)

    def _block_keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """The keys of at least its first `count` blocks, which are full."""
        keys = sequence.block_keys
        if self.keys is not None and len(keys) < count:
            parent = keys[-1] if keys else self.keys.root(sequence.most_tokens)
            start, end = len(keys) * self.block_size, count * self.block_size
            keys += self.keys.chain(parent, sequence.tokens[start:end], self.block_size)
        return keys

    def _snapshots(self, sequence: Sequence, rows: int) -> list[Snapshot]:
        """The states worth keeping of a step's rows, in the order of these."""
        if self.keys is None or not sequence.shares_prefix or not self.states.exist:
            return []
        end = sequence.computed + rows
        if rows > 1 and end == len(sequence.tokens):
            end -= 1  # the same prompt again computes a token at least, so it cannot go on from its very end
        last = end // self.block_size * self.block_size
        keys = self._block_keys(sequence, last // self.block_size)
        return [
            Snapshot(place - sequence.computed - 1, keys[place // self.block_size - 1], place > sequence.prompt_length)
            for place in sorted({sequence.states.branch, last})
            if sequence.computed < place <= last
        ]
