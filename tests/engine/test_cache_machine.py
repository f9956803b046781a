"""Whatever happens to sequences, blocks and states are conserved, and what is found is what was computed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.cached import SIZE, Bench
from tests.engine.sequences import new_sequence

PREFIXES = [[], [1] * 4, [1] * 8, [1] * 4 + [2] * 5, [3] * 9, [1] * 13]
tails = st.lists(st.integers(1, 3), min_size=1, max_size=9)


class Cache(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, with drafts and by steps that fail, are preempted and go."""

    @initialize(
        blocks=st.integers(8, 30), states=st.sampled_from([0, 3, 5, 9]), shared=st.sampled_from([True, True, False])
    )
    def start(self, blocks: int, states: int, shared: bool) -> None:
        self.bench = Bench(blocks, states=states, shared=shared)
        self.computed: set[tuple[int, ...]] = set()
        self.arrivals = 0

    @rule(
        prefix=st.sampled_from(PREFIXES), tail=tails, scored=st.booleans(), shares=st.sampled_from([True, True, False])
    )
    def admit(self, prefix: list[int], tail: list[int], scored: bool, shares: bool) -> None:
        self.arrivals += 1
        sequence = new_sequence(prefix + tail, arrival=self.arrivals, scored=scored, shares_prefix=shares)
        before = (self.bench.cache.blocks.free, self.bench.cache.states.pool.free)
        if not self.bench.admit(sequence):
            assert (self.bench.cache.blocks.free, self.bench.cache.states.pool.free) == before
            assert (sequence.blocks, sequence.states.own, sequence.computed) == ([], -1, 0)
            return
        found = sequence.computed
        assert found % SIZE == 0
        assert found < len(sequence.tokens)
        assert not found or tuple(sequence.tokens[:found]) in self.computed
        assert not found or (shares and not scored)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        parts = self._parts(data)
        if parts:
            self.bench.run(*parts)
        for sequence, rows in parts:
            self.bench.cache.commit(sequence, rows)
            self._note(sequence)
            if sequence.remaining == 0:
                sequence.tokens.append(data.draw(st.integers(1, 3)))

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data(), forwarded=st.booleans())
    def step_that_fails(self, data: st.DataObject, forwarded: bool) -> None:
        parts = self._parts(data)
        if forwarded and parts:
            self.bench.run(*parts)
        else:
            for sequence, rows in parts:
                self.bench.cache.plan(sequence, rows)
        for sequence, _ in parts:
            self.bench.end(sequence)

    @precondition(lambda self: any(sequence.remaining == 1 for sequence in self.bench.running))
    @rule(data=st.data(), drafted=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def drafts(self, data: st.DataObject, drafted: list[int]) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.bench.running if s.remaining == 1]))
        if self.bench.drafts(sequence, drafted, data.draw(st.integers(0, len(drafted)))):
            self._note(sequence)
            sequence.tokens.append(data.draw(st.integers(1, 3)))

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.bench.end(data.draw(st.sampled_from(self.bench.running)))

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.bench.running))
        self.bench.end(sequence)
        assert (sequence.blocks, sequence.computed) == ([], 0)
        self.bench.admit(sequence)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        for sequence in list(getattr(self, "bench", Bench(1)).running):
            self.bench.end(sequence)
        self.conserved()

    def _parts(self, data: st.DataObject) -> list[tuple]:
        """Some of those that have room for their tokens, and how many of these are computed."""
        fitting = [s for s in self.bench.running if s.remaining and self.bench.cache.grow(s, len(s.tokens))]
        chosen = data.draw(st.lists(st.sampled_from(fitting), min_size=1, unique_by=id)) if fitting else []
        return [(sequence, data.draw(st.integers(1, sequence.remaining))) for sequence in chosen]

    def _note(self, sequence) -> None:
        if sequence.shares_prefix:
            ends = range(SIZE, sequence.computed + 1, SIZE)
            self.computed |= {tuple(sequence.tokens[:end]) for end in ends}


Cache.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestCache = Cache.TestCase
