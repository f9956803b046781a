"""Scheduling: every prompt finishes, blocks are conserved, running replies never starve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.cache import CacheManager
from pocketllm.engine.reply import Reply
from pocketllm.engine.request import RequestHandle
from pocketllm.engine.sampler import SamplingDefaults, resolve
from pocketllm.engine.scheduler import OVERDUE, Plan, Scheduler
from pocketllm.engine.sequence import Sequence
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary

VOCABULARY = Vocabulary()


def sequence(arrival: int, prompt: int, budget: int) -> Sequence:
    return Sequence(
        handle=RequestHandle(f"r{arrival}", (1,) * prompt, seed=0, n=1, cancel=lambda _: True),
        index=0,
        prompt_index=0,
        arrival=arrival,
        tokens=[1] * prompt,
        prompt_length=prompt,
        sampling=resolve(SamplingParams(), SamplingDefaults()),
        seed=0,
        budget=budget,
        end_ids=frozenset(),
        reply=Reply(VOCABULARY.tokenizer, ()),
    )


def scheduler(blocks: int = 64, *, most: int = 4, chunk: int = 16, share: float = 0.25) -> Scheduler:
    return Scheduler(CacheManager(blocks, 4), max_sequences=most, prefill_chunk=chunk, decode_share=share)


def run(plan: Plan, to: Scheduler, seconds: float = 1.0) -> None:
    """Do a step's work without a model: every sampled sequence gets a token."""
    sampled = plan.sampled
    for work in plan.work:
        to.cache.commit(work.sequence, work.tokens)
    for item in sampled:
        item.accept(65)
    to.drop([item for item in to if item.finished])
    to.account(plan, seconds)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=8),
    st.integers(18, 40),
    st.integers(1, 3),
    st.integers(1, 20),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7),
)
def test_everything_finishes_and_blocks_are_conserved(
    requests: list[tuple[int, int, int]], blocks: int, most: int, chunk: int, durations: list[float]
) -> None:
    planner = scheduler(blocks, most=most, chunk=chunk)
    arrivals = [(step, sequence(i, prompt, budget)) for i, (prompt, budget, step) in enumerate(requests)]
    arrivals.sort(key=lambda arrival: arrival[0])
    everything = [item for _, item in arrivals]
    for step in range(4000):
        while arrivals and arrivals[0][0] <= step:
            planner.add(arrivals.pop(0)[1])
        plan = planner.plan()
        check(plan, planner, blocks, most, chunk)
        if not plan.work:
            assert not list(planner), "sequences wait and nothing is planned"
            if not arrivals:
                break
            continue
        run(plan, planner, seconds=durations[step % len(durations)])
    assert all(item.finished and item.generated == item.budget for item in everything)
    assert planner.cache.blocks.free == blocks


def check(plan: Plan, planner: Scheduler, blocks: int, most: int, chunk: int) -> None:
    """What holds of every plan."""
    held = [block for item in planner for block in item.blocks]
    assert len(held) == len(set(held)) == blocks - planner.cache.blocks.free
    assert len(planner.running) <= most
    for work in plan.work:
        assert 1 <= work.tokens <= work.sequence.remaining
        assert len(work.sequence.blocks) * 4 >= work.sequence.computed + work.tokens
    assert sum(work.tokens for work in plan.work if work.tokens > 1) <= chunk


def test_the_prompt_with_fewest_tokens_left_goes_first_and_an_overdue_one_next() -> None:
    planner = scheduler(blocks=1000, most=100, chunk=8)
    long = sequence(0, 64, 1)
    planner.add(long)
    passed = 0
    for arrival in range(1, 40):
        planner.add(sequence(arrival, 8, 1))
        plan = planner.plan()
        if plan.work[0].sequence is long:
            break
        passed += 1
        run(plan, planner)
    assert passed == OVERDUE


def test_running_replies_decode_beside_and_between_chunks() -> None:
    planner = scheduler(blocks=1000, chunk=8, share=0.5)
    planner.add(sequence(0, 4, 100))
    run(planner.plan(), planner)
    planner.add(sequence(1, 32, 1))
    kinds = []
    for _ in range(6):
        plan = planner.plan()
        assert plan.decodes
        kinds.append(plan.prefills)
        # A chunk takes four times as long as a decode step: at a share of one half two decode steps repay it.
        run(plan, planner, seconds=4.0 if plan.prefills else 1.0)
    assert kinds == [True, False, False, True, False, False]


def test_growth_without_blocks_preempts_the_youngest_only() -> None:
    planner = scheduler(blocks=40, most=2, chunk=100)
    old, young = sequence(0, 8, 150), sequence(1, 8, 150)
    planner.add(old)
    planner.add(young)
    while not planner.preemptions:
        run(planner.plan(), planner)
    assert young in planner.waiting
    assert old in planner.running
    assert young.computed == 0
    assert not young.blocks


def test_an_overdue_prompt_that_does_not_fit_keeps_younger_ones_from_being_admitted() -> None:
    planner = scheduler(blocks=40, most=8, chunk=4)
    running = sequence(0, 100, 20)
    planner.add(running)
    run(planner.plan(), planner)
    large = sequence(1, 90, 1)
    large.passed_over = OVERDUE
    planner.add(large)
    planner.add(sequence(2, 2, 1))
    planned = {work.sequence.arrival for work in planner.plan().work}
    assert planned == {0}
