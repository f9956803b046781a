"""What the next step computes: which sequences, how many of their tokens, in which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pocketllm.engine.cache import CacheManager
from pocketllm.engine.sequence import Sequence

OVERDUE = 8
"""A prompt that so many chunks passed over takes the next one."""

GROWTH = 64
"""Tokens of reply that admission reserves room for beside the prompt."""


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's part of a step: `tokens` of it, from `sequence.computed` on."""

    sequence: Sequence
    tokens: int

    @property
    def completes(self) -> bool:
        """Whether the step computes all that the next token is drawn from."""
        return self.tokens == self.sequence.remaining

    @property
    def draws(self) -> bool:
        """Whether a token is drawn from it."""
        return self.completes and self.sequence.budget > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `prefills` says whether prompt chunks are in it, `decodes` whether running replies are."""

    work: tuple[Work, ...]
    prefills: bool
    decodes: bool

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences whose next token the step gives, in the order of their logits rows."""
        return tuple(work.sequence for work in self.work if work.draws)


class Scheduler:
    """Continuous batching with chunked prefill.

    Every running reply decodes in every step. Beside them the step computes up to `prefill_chunk` prompt tokens: the
    prompt with the fewest tokens left goes first, and one passed over for `OVERDUE` chunks goes next. After a chunk,
    steps without one follow until replies have had `decode_share` of the chunk's time.

    Prompts whose tokens are scored want logits of every row: of those, a step computes `scored_rows` at most.

    A sequence is admitted when its prompt and some growth find free blocks. Where growth finds none later, the youngest
    running sequence gives its blocks back and goes on later, from what is still found of it; its reader notices
    nothing. A sequence whose next block is about to be computed by a running one waits for that, so what several
    choices or requests begin with is computed once.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_sequences: int,
        prefill_chunk: int,
        decode_share: float,
        scored_rows: int | None = None,
    ) -> None:
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.cached_tokens = 0
        self._max_sequences = max_sequences
        self._prefill_chunk = prefill_chunk
        self._decode_share = decode_share
        self._scored_rows = prefill_chunk if scored_rows is None else scored_rows
        self._owed = 0.0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence that is not finished."""
        return iter([*self.running, *self.waiting])

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that ended and free their blocks at once."""
        for sequence in sequences:
            self.cache.release(sequence)
            for place in (self.running, self.waiting):
                if sequence in place:
                    place.remove(sequence)

    def plan(self) -> Plan:
        """The next step; its work is empty only when nothing is to be done."""
        self._make_room()
        decoding = [Work(sequence, 1) for sequence in self.running if sequence.remaining == 1]
        if not decoding:
            self._owed = 0.0
        chunks = [] if decoding and self._owed > 0 else self._chunks()
        for work in (*decoding, *chunks):
            self.cache.plan(work.sequence, work.tokens)
        return Plan((*decoding, *chunks), prefills=bool(chunks), decodes=bool(decoding))

    def account(self, plan: Plan, seconds: float) -> None:
        """Tell how long a step took."""
        if plan.prefills and plan.decodes:
            self._owed = self._decode_share * seconds
        elif plan.decodes:
            self._owed -= seconds

    def _make_room(self) -> None:
        """See that every running sequence has blocks for its tokens, preempting the youngest where none is left."""
        for sequence in sorted(self.running, key=lambda s: s.arrival):
            if sequence not in self.running:
                continue  # preempted for an older one
            while not self.cache.grow(sequence, len(sequence.tokens)):
                youngest = max(self.running, key=lambda s: s.arrival)
                self._preempt(youngest)
                if youngest is sequence:
                    break

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.release(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.preemptions += 1

    def _chunks(self) -> list[Work]:
        budget = self._prefill_chunk
        scored = self._scored_rows
        chunks = []
        passed = []
        admitting = True
        candidates = [sequence for sequence in self.running if sequence.remaining > 1]
        if len(self.running) < self._max_sequences:
            candidates += self.waiting
        for sequence in sorted(candidates, key=_turn):
            room = budget if sequence.prompt_logprobs is None else min(budget, scored)
            if room and not sequence.blocks and admitting and self._awaits_another(sequence):
                continue
            if room and (sequence.blocks or (admitting and self._admit(sequence))):
                chunk = Work(sequence, min(sequence.remaining, room))
                budget -= chunk.tokens
                scored -= 0 if sequence.prompt_logprobs is None else chunk.tokens
                sequence.passed_over = 0
                chunks.append(chunk)
            else:
                passed.append(sequence)
                # What an overdue sequence waits for must not go to a younger one.
                admitting = admitting and sequence.passed_over < OVERDUE
        if chunks:
            for sequence in passed:
                sequence.passed_over += 1
        return chunks

    def _awaits_another(self, sequence: Sequence) -> bool:
        return len(self.running) < self._max_sequences and self.cache.awaits(sequence, self.running)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a place, blocks and what is cached of it; False when there is no room for it."""
        if len(self.running) >= self._max_sequences:
            return False
        if not self.cache.admit(sequence, min(len(sequence.tokens) + GROWTH, sequence.most_tokens)):
            return False
        if sequence.handle.cached_tokens is None:  # what its choices share afterwards was not there before it
            sequence.handle.cached_tokens = sequence.computed
            self.cached_tokens += sequence.computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True


def _turn(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.passed_over < OVERDUE, sequence.remaining, sequence.arrival
