"""Engines with a prefix cache answer as engines without one do, and say what they did not compute."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.engine import Engine
from pocketllm.errors import EngineError, InvalidRequestError
from pocketllm.types import SamplingParams
from tests.engine.recording import recorded
from tests.engine.test_engine import expected_arithmetic
from tests.scripted import Vocabulary, arithmetic, scripted_engine

BROKEN = 200
BLOCK = 4
STATES = [0, 12]
"""Slots of recurrent states; 0 for a model without them."""


def greedy(count: int, **kwargs) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **kwargs)


@pytest.fixture
def make_engine(request: pytest.FixtureRequest):
    def make(*args, **kwargs) -> Engine:
        engine = scripted_engine(*args, **kwargs)
        request.addfinalizer(engine.close)
        return engine

    return make


def breaking(vocabulary: Vocabulary):
    """Arithmetic, but for contexts with a token that no kernel survives."""
    normal = arithmetic(vocabulary)

    def script(context: tuple[int, ...]) -> int:
        if BROKEN in context:
            raise RuntimeError("a kernel broke")
        return normal(context)

    return script


def all_free(engine: Engine) -> bool:
    cache = engine._scheduler.cache
    return cache.blocks.free == cache.blocks.total and cache.states.pool.free == cache.states.pool.total


beginnings = st.sampled_from([[], [1] * 8, [1] * 21, [1] * 8 + [2] * 13, [3] * 40])
endings = st.lists(st.integers(1, 4), min_size=1, max_size=20)
fates = st.sampled_from(["ends", "ends", "ends", "breaks", "is cancelled"])


@pytest.mark.parametrize("states", STATES)
@given(
    requests=st.lists(
        st.tuples(beginnings, endings, st.integers(1, 30), st.integers(1, 3), fates), min_size=1, max_size=9
    ),
    blocks=st.integers(28, 70),
    most=st.integers(1, 4),
    chunk=st.integers(1, 40),
)
@settings(max_examples=40)
def test_answers_are_those_of_an_engine_without_a_cache(
    states: int, requests: list[tuple], blocks: int, most: int, chunk: int
) -> None:
    engine = scripted_engine(
        breaking(Vocabulary()),
        blocks=blocks,
        max_model_len=112,
        max_sequences=most,
        prefill_chunk=chunk,
        states=states,
    )
    prompts = [[*start, *([BROKEN] if fate == "breaks" else []), *end] for start, end, _, _, fate in requests]
    try:
        handles = [
            engine.submit(prompt, greedy(count, n=choices))
            for prompt, (_, _, count, choices, _) in zip(prompts, requests, strict=True)
        ]
        for handle, (*_, fate) in zip(handles, requests, strict=True):
            if fate == "is cancelled":
                handle.cancel()
        for handle, prompt, (_, _, count, choices, fate) in zip(handles, prompts, requests, strict=True):
            expected = expected_arithmetic(prompt, count)
            try:
                result = handle.result()
            except EngineError:  # its own fault, or that of another in its step
                assert any(other == "breaks" for *_, other in requests)
                continue
            for output in result.outputs:
                assert list(output.token_ids) == expected[: len(output.token_ids)]
                assert fate == "is cancelled" or len(output.token_ids) == count
            assert len(result.outputs) == choices
            assert result.usage.cached_tokens < len(prompt)
        assert engine.statistics().alive
        assert all_free(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("states", STATES)
def test_what_was_found_is_told(make_engine, states: int) -> None:
    engine = make_engine(arithmetic(Vocabulary()), states=states)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    first = engine.submit(prompt, greedy(7)).result()
    again = engine.submit(prompt, greedy(7)).result()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 8)
    assert first.token_ids == again.token_ids
    turn = [*prompt, *first.token_ids, 11, 12]  # of the reply all but the last token were computed: 16
    assert engine.submit(turn, greedy(1)).result().usage.cached_tokens == 16
    assert engine.submit(prompt[:8], greedy(1)).result().usage.cached_tokens == (4 if states == 0 else 0)
    statistics = engine.statistics()
    assert statistics.cached_tokens_total == 8 + 16 + (4 if states == 0 else 0)
    assert statistics.prompt_tokens_total == 10 + 10 + 19 + 8


def test_the_cache_can_be_left_out(make_engine) -> None:
    prompt = [1] * 10
    engine = make_engine(arithmetic(Vocabulary()))
    engine.submit(prompt, greedy(3, cache_prompt=False)).result()
    assert engine.submit(prompt, greedy(3)).result().usage.cached_tokens == 0
    assert engine.submit(prompt, greedy(3, cache_prompt=False)).result().usage.cached_tokens == 0
    assert engine.submit(prompt, greedy(3)).result().usage.cached_tokens == 8
    without = make_engine(arithmetic(Vocabulary()), prefix_cache=False)
    for _ in range(2):
        assert without.submit(prompt, greedy(3)).result().usage.cached_tokens == 0


@pytest.mark.parametrize("states", STATES)
def test_choices_compute_what_they_share_once(states: int) -> None:
    prompt = [1] * 41
    with recorded(arithmetic(Vocabulary()), prefill_chunk=16, max_sequences=8, states=states) as (engine, runtime):
        result = engine.submit(prompt, greedy(5, n=4)).result()
        assert result.usage.cached_tokens == 0
        assert len({output.token_ids for output in result.outputs}) == 1
    computed = [position for batch in runtime.batches for position in batch.positions.tolist()]
    assert [computed.count(place) for place in range(40)] == [1] * 40
    assert computed.count(40) == 4


def test_prompts_that_arrive_together_compute_what_they_share_once() -> None:
    shared = [1] * 24
    with recorded(arithmetic(Vocabulary()), prefill_chunk=8) as (engine, runtime):
        with engine._lock:
            handles = [engine.submit([*shared, other, other], greedy(2)) for other in (2, 3, 4)]
        for handle in handles:
            handle.result()
    computed = [position for batch in runtime.batches for position in batch.positions.tolist()]
    assert [computed.count(place) for place in range(24)] == [1] * 24


@pytest.mark.parametrize("states", STATES)
def test_those_that_wait_for_a_prefix_go_on_when_the_one_that_computes_it_is_cancelled(
    make_engine, states: int
) -> None:
    started, gate = threading.Event(), threading.Event()
    normal = arithmetic(Vocabulary())

    def script(context: tuple[int, ...]) -> int:
        if context[0] == 9:  # runs beside them and holds up the step
            started.set()
            assert gate.wait(30)
        return normal(context)

    engine = make_engine(script, prefill_chunk=8, states=states, decode_share=0.0)
    beside = engine.submit([9], greedy(30))
    assert started.wait(30)
    first, second = (engine.submit([1] * 60, greedy(3)) for _ in range(2))
    first.cancel()
    gate.set()
    assert list(second.result().token_ids) == expected_arithmetic([1] * 60, 3)
    assert first.result().finish_reason == "cancelled"
    beside.result()


@pytest.mark.parametrize("states", STATES)
def test_a_preempted_sequence_finds_its_own_blocks_and_what_it_was_told_stays(states: int) -> None:
    with recorded(
        arithmetic(Vocabulary()), blocks=44, max_model_len=120, max_sequences=2, prefill_chunk=64, states=states
    ) as (engine, runtime):
        handles = [engine.submit([first] * 20, greedy(90)) for first in (1, 2)]
        for handle, first in zip(handles, (1, 2), strict=True):
            result = handle.result()
            assert list(result.token_ids) == expected_arithmetic([first] * 20, 90)
            assert result.usage.cached_tokens == 0
        assert engine.statistics().preemptions_total > 0
        assert engine.statistics().cached_tokens_total == 0
        assert all_free(engine)
    starts = [int(start) for batch in runtime.batches for start in batch.positions[batch.query_start[:-1]]]
    assert starts.count(0) == 2


@pytest.mark.parametrize("states", STATES)
def test_scored_prompts_are_the_same_after_a_hit(make_engine, states: int) -> None:
    engine = make_engine(arithmetic(Vocabulary()), states=states)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    scores = [
        engine.submit(prompt, SamplingParams(logprobs=2), prefill_only=True, prompt_logprobs=True).result()
        for _ in range(2)
    ]
    assert scores[0].prompt_logprobs == scores[1].prompt_logprobs
    assert len(scores[1].prompt_logprobs or ()) == 10
    assert scores[1].usage.cached_tokens == 0
    assert engine.submit(prompt, greedy(1)).result().usage.cached_tokens == 8


def test_a_prompt_that_can_never_fit_evicts_nothing(make_engine) -> None:
    engine = make_engine(arithmetic(Vocabulary()), blocks=8, max_model_len=32)
    prompt = [1] * 30
    engine.submit(prompt, greedy(1)).result()
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        engine.submit([2] * 33, greedy(1))
    assert engine.submit(prompt, greedy(1)).result().usage.cached_tokens == 28


@pytest.mark.parametrize("states", STATES)
def test_a_step_whose_logits_are_no_numbers_leaves_nothing(make_engine, states: int) -> None:
    vocabulary = Vocabulary()
    normal = arithmetic(vocabulary)
    sound = threading.Event()
    nothing = np.full(vocabulary.size, np.nan, dtype=np.float32)
    engine = make_engine(lambda context: normal(context) if sound.is_set() else nothing, vocabulary, states=states)
    prompt = [1] * 10
    with pytest.raises(EngineError, match="not numbers"):
        engine.submit(prompt, greedy(1)).result()
    sound.set()
    assert engine.submit(prompt, greedy(1)).result().usage.cached_tokens == 0
    assert engine.submit(prompt, greedy(1)).result().usage.cached_tokens == 8
    assert all_free(engine)


def test_a_step_that_fails_leaves_what_was_computed_before_it_alone(make_engine) -> None:
    engine = make_engine(breaking(Vocabulary()), prefill_chunk=8)
    with pytest.raises(EngineError, match="a kernel broke"):
        engine.submit([1] * 20 + [BROKEN], greedy(1)).result()
    # Chunks of 8, 8 and 5 tokens: the last one broke, and with it went the block that it had filled.
    assert engine.submit([1] * 30, greedy(1)).result().usage.cached_tokens == 16
    assert all_free(engine)
