"""The engine over a scripted runtime: what a request gets depends on the request alone, and failures stay with it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.engine import Engine
from pocketllm.errors import EngineDeadError, EngineError, InvalidRequestError, QueueFullError
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary, arithmetic, reply_with, scripted_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def expected_arithmetic(prompt: list[int], count: int) -> list[int]:
    script = arithmetic(Vocabulary())
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(script(tuple(tokens)))
    return tokens[len(prompt) :]


prompts = st.lists(st.integers(1, 255), min_size=1, max_size=70)


@given(
    st.lists(st.tuples(prompts, st.integers(1, 40)), min_size=1, max_size=9),
    st.integers(30, 60),
    st.integers(1, 4),
    st.integers(1, 40),
)
@settings(max_examples=30)
def test_replies_do_not_depend_on_batch_chunk_or_preemption(
    requests: list[tuple[list[int], int]], blocks: int, most: int, chunk: int
) -> None:
    engine = scripted_engine(
        arithmetic(Vocabulary()), blocks=blocks, max_model_len=110, max_sequences=most, prefill_chunk=chunk
    )
    try:
        handles = [engine.submit(p, SamplingParams(temperature=0.0, max_tokens=n)) for p, n in requests]
        for handle, (prompt, count) in zip(handles, requests, strict=True):
            assert list(handle.result().token_ids) == expected_arithmetic(prompt, count)
        assert engine.statistics().kv_blocks_free == blocks
    finally:
        engine.close()


@pytest.fixture
def make_engine(request: pytest.FixtureRequest):
    def make(*args, **kwargs) -> Engine:
        engine = scripted_engine(*args, **kwargs)
        request.addfinalizer(engine.close)
        return engine

    return make


def test_the_end_token_ends_a_reply_is_counted_and_not_shown(make_engine) -> None:
    vocabulary = Vocabulary(["Hello", " world"])
    engine = make_engine(reply_with(vocabulary.ids("Hello", " world")), vocabulary)
    result = engine.submit([1, 2, 3], GREEDY).result()
    assert (result.text, result.finish_reason) == ("Hello world", "stop")
    assert list(result.token_ids) == vocabulary.ids("Hello", " world")
    assert result.usage.as_dict() == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "cached_tokens": 0,
    }


def test_streamed_events_join_to_the_result(make_engine) -> None:
    vocabulary = Vocabulary(["DEF", "GH", "I", "J", "K", "LM"])
    engine = make_engine(reply_with(vocabulary.ids("DEF", "GH", "I", "J", "K", "LM")), vocabulary)
    handle = engine.submit([1], SamplingParams(temperature=0.0, stop=("IJKL",)))
    events = list(handle.events())
    assert "".join(event.text for event in events) == "DEFGH"
    assert events[-1].finish_reason == "stop"
    assert events[-1].metadata["stop_match"] == "IJKL"
    assert events[-1].metadata["completion_tokens"] == 6
    assert handle.output().text == "DEFGH"


@pytest.mark.parametrize("stop", [(), ("IJZ",)])
def test_text_held_back_as_a_possible_stop_is_not_lost_at_the_budget(make_engine, stop: tuple[str, ...]) -> None:
    vocabulary = Vocabulary(["DEF", "GH", "I"])
    engine = make_engine(reply_with(vocabulary.ids("DEF", "GH", "I", "I")), vocabulary)
    result = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=3, stop=stop)).result()
    assert (result.text, result.finish_reason) == ("DEFGHI", "length")


def test_min_tokens_and_ignore_eos_keep_a_reply_going(make_engine) -> None:
    vocabulary = Vocabulary()
    engine = make_engine(lambda context: vocabulary.end, vocabulary)
    short = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=9)).result()
    assert (short.finish_reason, short.usage.completion_tokens) == ("stop", 1)
    longer = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4)).result()
    assert (longer.finish_reason, longer.usage.completion_tokens) == ("stop", 5)
    whole = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)).result()
    assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 9)


def test_choices_sample_apart_and_a_seed_repeats_them(make_engine) -> None:
    vocabulary = Vocabulary()
    flat = np.zeros(vocabulary.size, dtype=np.float32)
    engine = make_engine(lambda context: flat, vocabulary)
    params = SamplingParams(temperature=1.0, n=4, seed=11, max_tokens=12, ignore_eos=True)
    first, second = engine.submit([5], params).result(), engine.submit([5], params).result()
    assert first.outputs == second.outputs
    assert len({output.token_ids for output in first.outputs}) == 4
    alone = engine.submit([5], SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)).result()
    assert alone.token_ids == first.token_ids
    drawn = engine.submit([5], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)).result()
    again = SamplingParams(temperature=1.0, seed=drawn.seed, max_tokens=12, ignore_eos=True)
    assert engine.submit([5], again).result().token_ids == drawn.token_ids


def test_a_seeded_reply_does_not_change_beside_others(make_engine) -> None:
    vocabulary = Vocabulary()
    flat = np.linspace(0, 1, vocabulary.size, dtype=np.float32)
    engine = make_engine(lambda context: flat, vocabulary)
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=15, ignore_eos=True)
    alone = engine.submit([9, 9], seeded).result().token_ids
    for _ in range(4):
        other = engine.submit([3], SamplingParams(temperature=1.0, max_tokens=30))
        assert engine.submit([9, 9], seeded).result().token_ids == alone
        other.result()


def test_a_step_that_fails_ends_its_own_requests_and_the_engine_serves_on(make_engine) -> None:
    vocabulary = Vocabulary()
    normal = arithmetic(vocabulary)

    def script(context: tuple[int, ...]) -> int:
        if 200 in context:
            raise RuntimeError("a kernel broke")
        return normal(context)

    engine = make_engine(script, vocabulary)
    with pytest.raises(EngineError, match="a kernel broke"):
        engine.submit([200], GREEDY).result()
    assert list(engine.submit([1, 2], GREEDY).result().token_ids) == expected_arithmetic([1, 2], 20)
    statistics = engine.statistics()
    assert statistics.alive
    assert statistics.kv_blocks_free == statistics.kv_blocks_total


def test_logits_that_are_no_numbers_fail_one_request_alone(make_engine) -> None:
    vocabulary = Vocabulary()
    normal = arithmetic(vocabulary)
    gate = threading.Event()

    def script(context: tuple[int, ...]):
        gate.wait(10)
        if 200 in context:
            return np.full(vocabulary.size, np.nan, dtype=np.float32)
        return normal(context)

    engine = make_engine(script, vocabulary)
    good, bad = engine.submit([1, 2], GREEDY), engine.submit([200], GREEDY)
    gate.set()
    with pytest.raises(EngineError, match="not numbers"):
        bad.result()
    assert list(good.result().token_ids) == expected_arithmetic([1, 2], 20)


def test_cancelling_ends_every_choice_and_frees_the_blocks(make_engine) -> None:
    vocabulary = Vocabulary()
    engine = make_engine(lambda context: 65, vocabulary, max_sequences=2)
    handle = engine.submit([1], SamplingParams(temperature=0.0, n=5, max_tokens=900), request_id="mine")
    assert handle.next_event() is not None
    assert engine.cancel("mine")
    result = handle.result()
    assert [output.finish_reason for output in result.outputs] == ["cancelled"] * 5
    assert not engine.cancel("mine")
    assert engine.submit([1], GREEDY, request_id="mine").result().finish_reason == "length"
    assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total


def test_leaving_a_stream_cancels_the_request(make_engine) -> None:
    engine = make_engine(lambda context: 65)
    handle = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=900), request_id="left")
    events = handle.events()
    next(events)
    events.close()
    while not handle.done:
        handle.next_event()
    assert handle.output().finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code"),
    [
        ([], SamplingParams(), "prompt", None),
        ([1] * 1024, SamplingParams(), "prompt", "context_length_exceeded"),
        ([1] * 1000, SamplingParams(max_tokens=25), "max_tokens", "context_length_exceeded"),
        ([1], SamplingParams(logit_bias={99999: 5}), "logit_bias", None),
        ([1], SamplingParams(stop_token_ids=(99999,)), "stop_token_ids", None),
    ],
)
def test_requests_that_cannot_be_run_are_refused(make_engine, prompt, params, param, code) -> None:
    engine = make_engine(lambda context: 65)
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit(prompt, params)
    assert (refused.value.param, refused.value.code) == (param, code)
    if code:
        assert str(refused.value).startswith("This server's maximum context length is 1024 tokens")
        assert refused.value.details == {"n_prompt_tokens": len(prompt), "n_ctx": 1024}


def test_the_window_is_the_budget_where_none_is_given(make_engine) -> None:
    engine = make_engine(lambda context: 65, max_model_len=64)
    result = engine.submit([1] * 10, SamplingParams(temperature=0.0)).result()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 54)


def test_a_full_queue_and_a_taken_id_are_refused(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        gate.wait(10)
        return 65

    engine = make_engine(script, max_queue=2, max_sequences=1)
    running = engine.submit([1], GREEDY, request_id="same")
    with pytest.raises(InvalidRequestError, match="still active"):
        engine.submit([1], GREEDY, request_id="same")
    while engine.statistics().running == 0:
        pass
    waiting = [engine.submit([1], GREEDY) for _ in range(2)]
    with pytest.raises(QueueFullError):
        engine.submit([1], GREEDY)
    gate.set()
    for handle in (running, *waiting):
        assert handle.result().finish_reason == "length"


def test_a_device_that_is_lost_ends_the_engine(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> NoReturn:
        raise RuntimeError("illegal memory access")

    engine = make_engine(lost)
    monkeypatch.setattr(engine._runtime, "export_blocks", lost)  # nothing can be read from it any more
    with pytest.raises(EngineError, match="illegal memory access"):
        engine.submit([1], GREEDY).result()
    engine._thread.join(10)
    statistics = engine.statistics()
    assert not statistics.alive
    assert "illegal memory access" in (statistics.error or "")
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        engine.submit([1], GREEDY)


def test_a_dead_engine_ends_every_request_and_says_so(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        gate.wait(10)
        return 65

    engine = make_engine(script, max_sequences=1)
    monkeypatch.setattr(engine._scheduler, "account", lambda *_: (_ for _ in ()).throw(MemoryError("gone")))
    handles = [engine.submit([1], GREEDY) for _ in range(3)]
    gate.set()
    for handle in handles:
        with pytest.raises(EngineDeadError, match="gone"):
            handle.result()
    statistics = engine.statistics()
    assert not statistics.alive
    assert "gone" in (statistics.error or "")
    with pytest.raises(EngineDeadError):
        engine.submit([1], GREEDY)


def test_a_step_that_never_returns_ends_every_request(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        gate.wait(30)
        return 65

    engine = make_engine(script, max_sequences=1, step_timeout=0.3)
    handles = [engine.submit([1], GREEDY) for _ in range(3)]
    for handle in handles:
        with pytest.raises(EngineDeadError, match="has not come back"):
            handle.result()
    assert not engine.statistics().alive
    with pytest.raises(EngineDeadError):
        engine.submit([1], GREEDY)
    gate.set()


def test_requests_of_many_threads_are_served(make_engine) -> None:
    engine = make_engine(arithmetic(Vocabulary()), max_sequences=4)
    prompts = [[i + 1] * (i % 7 + 1) for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda prompt: engine.submit(prompt, GREEDY).result(), prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == expected_arithmetic(prompt, 20)


def test_closing_ends_what_runs(make_engine) -> None:
    engine = make_engine(lambda context: 65)
    handle = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=900))
    handle.next_event()
    engine.close()
    assert handle.result().finish_reason == "cancelled"
    with pytest.raises(EngineDeadError):
        engine.submit([1], GREEDY)
