"""Plans and the batches made of them: who takes part, how much is scored, what a sequence's rotary length is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.batching import output_rows
from pocketllm.engine.cache import CacheManager
from pocketllm.engine.scheduler import OVERDUE, Plan, Scheduler
from pocketllm.engine.sequence import Sequence
from pocketllm.types import SamplingParams, TokenLogprob
from tests.engine.recording import recorded
from tests.engine.sequences import LETTER, new_sequence
from tests.scripted import Vocabulary, arithmetic


def scheduler(*, blocks: int = 1000, most: int = 8, chunk: int = 8, scored: int | None = None) -> Scheduler:
    return Scheduler(
        CacheManager(blocks, 4), max_sequences=most, prefill_chunk=chunk, decode_share=0.25, scored_rows=scored
    )


def plain(arrival: int, prompt: int, budget: int, *, scored: bool = False) -> Sequence:
    return new_sequence([1] * prompt, arrival=arrival, budget=budget, scored=scored)


def run(plan: Plan, to: Scheduler, seconds: float = 1.0) -> None:
    """Do a step's work without a model."""
    sampled = plan.sampled
    for item in output_rows(plan).scored:
        item.sequence.add_prompt_logprob(TokenLogprob(item.place, b"", 0.0))
    for work in plan.work:
        to.cache.commit(work.sequence, work.tokens)
    for sequence in sampled:
        sequence.accept(LETTER)
    to.drop([sequence for sequence in to if sequence.finished])
    to.account(plan, seconds)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 40)), min_size=2, max_size=8),
    st.integers(18, 40),
    st.integers(2, 6),
    st.integers(1, 20),
    st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=1, max_size=7),
)
def test_every_running_reply_is_in_every_plan(
    requests: list[tuple[int, int, int]], blocks: int, most: int, chunk: int, durations: list[float]
) -> None:
    planner = scheduler(blocks=blocks, most=most, chunk=chunk)
    late = [(step, plain(i, prompt, budget)) for i, (prompt, budget, step) in enumerate(requests)]
    for step in range(4000):
        for arrival in [arrival for arrival in late if arrival[0] <= step]:
            late.remove(arrival)
            planner.add(arrival[1])
        plan = planner.plan()
        planned = [work.sequence for work in plan.work]
        assert len(planned) == len(set(planned))
        assert {item for item in planner.running if item.remaining == 1} <= set(planned)
        if not late and not plan.work:
            break
        run(plan, planner, seconds=durations[step % len(durations)])
    assert not list(planner)


def test_many_replies_run_beside_each_other() -> None:
    planner = scheduler(most=40, chunk=8)
    for arrival in range(40):
        planner.add(plain(arrival, 4, 50))
    while planner.waiting:
        run(planner.plan(), planner)
    assert [work.tokens for work in planner.plan().work] == [1] * 40


def test_a_prompt_that_got_its_chunk_waits_anew() -> None:
    planner = scheduler(most=100)
    long = plain(0, 64, 1)
    planner.add(long)
    turns = []
    for step in range(3 * OVERDUE):
        planner.add(plain(step + 1, 8, 1))
        plan = planner.plan()
        if plan.work[0].sequence is long:
            assert long.passed_over == 0
            turns.append(step)
        run(plan, planner)
    assert turns == [OVERDUE, 2 * OVERDUE + 1]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 20),
)
def test_a_step_scores_only_so_many_rows(prompts: list[tuple[int, bool]], rows: int, chunk: int) -> None:
    planner = scheduler(chunk=chunk, scored=rows)
    everything = [plain(i, length, 2, scored=scored) for i, (length, scored) in enumerate(prompts)]
    for item in everything:
        planner.add(item)
    for _ in range(400):
        plan = planner.plan()
        if not plan.work:
            break
        assert len(output_rows(plan).scored) <= rows
        run(plan, planner)
    assert all(item.finished for item in everything)


def test_prompts_that_are_not_scored_take_the_rest_of_the_chunk() -> None:
    planner = scheduler(chunk=8, scored=3)
    planner.add(plain(0, 6, 1, scored=True))
    planner.add(plain(1, 20, 1))
    assert [(work.sequence.arrival, work.tokens) for work in planner.plan().work] == [(0, 3), (1, 5)]


def test_a_prompt_is_scored_once_though_it_is_computed_twice() -> None:
    planner = scheduler(blocks=28, most=2, chunk=4)
    old, young = plain(0, 4, 80), plain(1, 20, 1, scored=True)
    planner.add(old)
    run(planner.plan(), planner)
    planner.add(young)
    places: list[int] = []
    preempted = False
    while not young.finished:
        plan = planner.plan()
        if 8 <= young.computed < 20 and not preempted:  # as growth without blocks does
            planner._preempt(young)
            preempted = True
            continue
        places += [item.place for item in output_rows(plan).scored]
        run(plan, planner)
    assert preempted
    assert places == list(range(1, 20))
    (event,) = young.take_news()
    entries = event.metadata["prompt_logprobs"]
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == list(range(1, 20))


def test_the_rotary_length_is_fixed_at_admission() -> None:
    requests = {1: (10, 90), 2: (8, 95), 3: (12, 80)}  # by first token: prompt, budget
    with recorded(arithmetic(Vocabulary()), blocks=40, max_model_len=110, prefill_chunk=8) as (engine, runtime):
        handles = [
            engine.submit([first] * prompt, SamplingParams(temperature=0.0, max_tokens=budget))
            for first, (prompt, budget) in requests.items()
        ]
        for handle in handles:
            handle.result()
        assert engine.statistics().preemptions_total > 0
    lengths: dict[int, set[int]] = {}
    for batch, first_tokens in zip(runtime.batches, runtime.first_tokens, strict=True):
        for first, length in zip(first_tokens, batch.rope_length.tolist(), strict=True):
            lengths.setdefault(first, set()).add(length)
    assert lengths == {first: {prompt + budget} for first, (prompt, budget) in requests.items()}
