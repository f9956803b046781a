"""A cache manager over a scripted runtime that checks what it reads: steps without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from pocketllm.engine.batching import OutputRows, flat_batch
from pocketllm.engine.cache import CacheManager
from pocketllm.engine.pool import Pool
from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.engine.scheduler import Plan, Work
from pocketllm.engine.sequence import Sequence
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.null_runtime import NullRuntime
from tests.scripted import ScriptedConfig

SIZE = 4
VOCAB = 64


class Bench:
    """A cache, its runtime and the sequences that were admitted."""

    def __init__(self, blocks: int, *, states: int = 0, shared: bool = True, identity: str = "bench") -> None:
        self.contexts: list[tuple[int, ...]] = []
        options = RuntimeOptions(device="cpu", dtype="float32", block_size=SIZE)
        self.runtime = NullRuntime.scripted(
            self._script, ScriptedConfig(vocab_size=VOCAB), options, recurrent=states > 0
        )
        self.runtime.allocate(blocks, states)
        self.cache = CacheManager(blocks, SIZE, states=states, keys=PrefixKeys(identity) if shared else None)
        self.running: list[Sequence] = []

    def _script(self, context: tuple[int, ...]) -> int:
        self.contexts.append(context)
        return 0

    def admit(self, sequence: Sequence) -> bool:
        admitted = self.cache.admit(sequence, len(sequence.tokens))
        if admitted:
            self.running.append(sequence)
        return admitted

    def end(self, sequence: Sequence) -> None:
        self.cache.release(sequence)
        self.running.remove(sequence)

    def run(self, *parts: tuple[Sequence, int], drafted: bool = False) -> None:
        """Compute so many tokens of each; the runtime reads back what it has of them, which must be their tokens."""
        if not drafted:
            for sequence, rows in parts:
                self.cache.plan(sequence, rows)
        plan = Plan(tuple(Work(sequence, rows) for sequence, rows in parts), prefills=True, decodes=False)
        every_row = OutputRows(tuple(range(sum(rows for _, rows in parts))), (), ())
        self.contexts.clear()
        self.runtime.forward(flat_batch(plan, every_row, SIZE))
        ends = [(sequence, sequence.computed + row + 1) for sequence, rows in parts for row in range(rows)]
        assert self.contexts == [tuple(sequence.tokens[:end]) for sequence, end in ends]

    def step(self, *parts: tuple[Sequence, int]) -> None:
        """Compute so many tokens of each, which then count."""
        self.run(*parts)
        for sequence, rows in parts:
            self.cache.commit(sequence, rows)

    def prefill(self, sequence: Sequence) -> None:
        """Admit it, and compute all of it in one step."""
        assert self.admit(sequence)
        self.step((sequence, sequence.remaining))

    def decode(self, sequence: Sequence, *tokens: int) -> None:
        """Append tokens one by one, and compute each."""
        for token in tokens:
            sequence.tokens.append(token)
            assert self.cache.grow(sequence, len(sequence.tokens))
            self.step((sequence, 1))

    def drafts(self, sequence: Sequence, drafted: Items[int], accepted: int) -> bool:
        """Compute the last token and some drafts behind it, of which `accepted` hold; False when there is no room."""
        rows = 1 + len(drafted)
        slots = self.cache.reserve_drafts(sequence, rows)
        if slots is None:
            return False
        exist = self.cache.states.exist
        assert len(set(slots)) == rows if exist else slots == [-1] * rows
        sequence.tokens += drafted
        self.run((sequence, rows), drafted=True)
        del sequence.tokens[len(sequence.tokens) - len(drafted) + accepted :]
        self.cache.commit(sequence, 1 + accepted)
        return True

    def check(self) -> None:
        """What holds between steps."""
        blocks, states = self.cache.blocks, self.cache.states
        check_pool(blocks, Counter(block for sequence in self.running for block in sequence.blocks))
        slots: Counter[int] = Counter()
        for sequence in self.running:
            assert not sequence.states.saves
            slots.update({sequence.states.own, sequence.states.source} - {-1})
        check_pool(states.pool, slots)
        writers = Counter(block for sequence in self.running for block in sequence.blocks[sequence.shared :])
        assert all(count == 1 for count in writers.values()), "a block has two writers"
        assert all(blocks._holders[block] == 1 for block in writers), "a block is written and read"
        for sequence in self.running:
            assert len(sequence.blocks) * SIZE >= sequence.computed
            assert sequence.computed // SIZE >= sequence.shared
            for block, key in zip(sequence.blocks[: sequence.shared], sequence.block_keys, strict=False):
                assert blocks.find(key) == block
        assert all(blocks.find(key) is not None for key in states.pool._places), "a snapshot outlived its block"


def check_pool(pool: Pool, holders: Counter[int]) -> None:
    """Every place is held by those that hold it, kept or empty, and one of these only."""
    assert {place: count for place, count in enumerate(pool._holders) if count} == dict(holders)
    held, kept, empty = set(holders), set(pool._kept), set(pool._empty)
    assert len(pool._empty) == len(empty)
    assert len(held) + len(kept) + len(empty) == len(held | kept | empty) == pool.total
    assert pool.free == pool.total - len(held)
    assert all(pool._keys[place] is not None for place in kept)
    assert all(pool._keys[place] is None for place in empty)
    assert {key: place for place, key in enumerate(pool._keys) if key is not None} == pool._places
