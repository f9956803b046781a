"""The engine's side of the caches: which blocks and state slots a sequence has, and which it need not compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items

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
    one before it, as behind a common system prompt; and at the last block end that a reply has passed, where the next
    turn of its conversation finds it. A sequence's next one takes the place of the one before, but for a few that
    last, so that a long prompt does not push out what others have left.

    At least one token of a sequence is always computed: the next is drawn from its logits.

    The engine's thread alone calls it, but for `prompt_keys`.

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

    def prompt_keys(self, prompt_token_ids: Items[int], budget: int) -> list[bytes]:
        """The keys of a prompt's blocks for a reply of up to `budget` tokens; any thread may ask."""
        if self.keys is None:
            return []
        root = self.keys.root(len(prompt_token_ids) + budget)
        return self.keys.chain(root, prompt_token_ids, self.block_size)

    def admit(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens of a sequence that has none, and state slots; what is found counts as computed.

        False, and nothing changed, when they are not free.
        """
        keys, count = self._found(sequence)
        missing = self.blocks_for(tokens) - count
        # Whoever holds a block holds all before it, so those that nobody holds are the last of the found ones.
        held = bisect_left(keys, True, hi=count, key=lambda key: not self.blocks.held(self.blocks.place(key)))
        if missing > self.blocks.free - (count - held):
            return False
        found = self.blocks_of(keys[:count])
        self.blocks.hold(found)
        if not self.states.begin(sequence.states, keys[count - 1] if count else None):
            self.blocks.release(reversed(found))
            return False
        own = self.blocks.take(missing)
        assert own is not None, "so many were counted above"
        sequence.blocks = found + own
        sequence.shared = count
        sequence.computed = count * self.block_size
        sequence.states.branch = self.chained(keys, self._most_found(sequence)) * self.block_size
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
        keys, place = self._found(sequence)
        if place == self._most_found(sequence):
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
        return self.blocks_of(keys[: self._count(keys, len(keys))])

    def chained(self, keys: list[bytes], most: int) -> int:
        """How many of a chain's first `most` blocks are there, with or without states at their end."""
        # What can be found is a chain without gaps, so it can be halved.
        return bisect_left(keys, True, hi=most, key=lambda key: self.blocks.find(key) is None)

    def blocks_of(self, keys: list[bytes]) -> list[int]:
        """The blocks of keys that are found."""
        return [self.blocks.place(key) for key in keys]

    def _count(self, keys: list[bytes], most: int) -> int:
        """How many of a chain's first `most` blocks a sequence could go on behind."""
        count = self.chained(keys, most)
        if self.states.exist:
            while count and self.states.pool.find(keys[count - 1]) is None:
                count -= 1
        return count

    def _most_found(self, sequence: Sequence) -> int:
        """How many blocks it need not compute if they are found."""
        shares = self.keys is not None and sequence.shares_prefix
        return sequence.most_cached // self.block_size if shares else 0

    def _found(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """The keys of its blocks, and behind how many of them it could start."""
        most = self._most_found(sequence)
        keys = self._block_keys(sequence, most)
        return keys, self._count(keys, most)

    def _block_keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """The keys of at least its first `count` blocks, which are full; those of its reply are made here."""
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
        if end == sequence.prompt_length:
            end -= 1  # the same prompt again computes a token at least, so it cannot go on from its very end
        last = end // self.block_size * self.block_size
        keys = self._block_keys(sequence, last // self.block_size)
        return [
            Snapshot(
                place - sequence.computed - 1, keys[place // self.block_size - 1], not self._lasts(sequence, place)
            )
            for place in sorted({sequence.states.branch, last})
            if sequence.computed < place <= last
        ]

    def _lasts(self, sequence: Sequence, place: int) -> bool:
        """Whether the snapshot after so many tokens stays when the sequence leaves the next one.

        That is where prompts part, where the same prompt starts again, and the first behind each power of two: so a
        long prompt leaves a few, and one that parts from it computes half of what they have in common at most.
        """
        if place in (sequence.states.branch, (sequence.prompt_length - 1) // self.block_size * self.block_size):
            return True
        return place < sequence.prompt_length and place.bit_length() > sequence.computed.bit_length()
