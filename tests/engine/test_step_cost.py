"""What a step costs does not grow with the prompts that wait or run: counted in look-ups, hashes and tokens touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest

from pocketllm.engine.batching import flat_batch, output_rows
from pocketllm.engine.cache import CacheManager
from pocketllm.engine.pool import Pool
from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.engine.sampler import sampling_rows
from pocketllm.engine.scheduler import OVERDUE, Plan, Scheduler, Work
from pocketllm.types import SamplingParams
from tests.engine.sequences import LETTER, new_sequence
from tests.scripted import Vocabulary, arithmetic, scripted_engine

SIZE = 4
BLOCKS = 1000
WAITING = 10


class Counts:
    """How often methods of a pool were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.calls = 0
        for name in names:
            monkeypatch.setattr(Pool, name, self._counted(getattr(Pool, name)), raising=True)

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.calls += 1
            return method(*args)

        return counted


class Watched(list[int]):
    """Tokens that note whether all of them are visited, and the longest part that is copied."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.visited = False
        self.longest = 0

    def __iter__(self) -> Iterator[int]:
        self.visited = True
        return super().__iter__()

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        part = super().__getitem__(place)
        self.longest = max(self.longest, len(part) if isinstance(part, list) else 1)
        return part


def crowded() -> Scheduler:
    """A prompt of many blocks that runs, and others with the same beginning for which there is no room."""
    cache = CacheManager(BLOCKS + 30, SIZE, keys=PrefixKeys("model"))
    planner = Scheduler(cache, max_sequences=50, prefill_chunk=10**6, decode_share=0.0)
    shared = [1] * (BLOCKS * SIZE)
    planner.add(new_sequence([*shared, 2], budget=10))
    (work,) = planner.plan().work
    cache.commit(work.sequence, work.tokens)
    work.sequence.tokens.append(3)
    for arrival in range(1, WAITING + 1):
        planner.add(new_sequence([*shared, *[arrival + 3] * 200], arrival=arrival))
    return planner


def test_prompts_that_wait_cost_a_few_look_ups_each(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = crowded()
    planner.plan()
    counts = Counts(monkeypatch, "find", "place", "held")
    assert len(planner.plan().work) == 1
    assert 0 < counts.calls <= WAITING * 6 * BLOCKS.bit_length()


def test_prompts_behind_an_overdue_one_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = crowded()
    planner.waiting[-1].passed_over = OVERDUE
    planner.plan()
    counts = Counts(monkeypatch, "find", "place", "held")
    planner.plan()
    assert 0 < counts.calls <= 6 * BLOCKS.bit_length()


def test_a_prompt_is_hashed_once_and_by_the_one_who_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[tuple[int, int]] = []
    chain = PrefixKeys.chain

    def noted(self: PrefixKeys, parent: bytes, token_ids: Any, block_size: int) -> list[bytes]:
        hashed.append((threading.get_ident(), len(token_ids) // block_size))
        return chain(self, parent, token_ids, block_size)

    monkeypatch.setattr(PrefixKeys, "chain", noted)
    engine = scripted_engine(arithmetic(Vocabulary()), prefill_chunk=16)
    try:
        engine.submit([1] * 401, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, n=3)).result()
    finally:
        engine.close()
    assert [blocks for thread, blocks in hashed if thread == threading.get_ident()] == [100]
    assert max(blocks for thread, blocks in hashed if thread != threading.get_ident()) == 1  # of the replies


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_drawing_a_token_does_not_visit_the_prompt(penalty: float) -> None:
    sequence = new_sequence([1, 2, 3] * 50, SamplingParams(repetition_penalty=penalty, presence_penalty=0.5))
    sequence.tokens = watched = Watched(sequence.tokens)
    for token in (LETTER, 2, LETTER):
        rows = sampling_rows([sequence])
        sequence.accept(token)
    assert not watched.visited
    assert rows.adjust_ids.tolist() == ([1, 2, 3, LETTER] if penalty > 1 else [2, LETTER])


def test_a_chunk_copies_its_own_tokens_only() -> None:
    sequence = new_sequence(range(200))
    sequence.tokens = watched = Watched(sequence.tokens)
    sequence.blocks, sequence.computed = list(range(50)), 40
    plan = Plan((Work(sequence, 8),), prefills=True, decodes=False)
    assert flat_batch(plan, output_rows(plan), SIZE).token_ids.tolist() == list(range(40, 48))
    assert watched.longest == 8
