"""One request's failure, cancelling, reader or id is no other's; under races too."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pocketllm.engine.engine import Engine
from pocketllm.engine.request import RequestHandle
from pocketllm.errors import EngineError
from pocketllm.types import SamplingParams
from tests.engine.recording import recorded
from tests.engine.sequences import LETTER
from tests.scripted import Vocabulary, arithmetic, scripted_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SHORT = SamplingParams(temperature=0.0, max_tokens=2)
BROKEN = 200
WAIT = 30.0


def wait(event: threading.Event) -> None:
    assert event.wait(WAIT)


@pytest.fixture
def make_engine(request: pytest.FixtureRequest):
    def make(*args, **kwargs) -> Engine:
        engine = scripted_engine(*args, **kwargs)
        request.addfinalizer(engine.close)
        return engine

    return make


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_a_failing_step_leaves_those_alone_that_wait_for_a_place(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        if BROKEN in context:
            raise RuntimeError("a kernel broke")
        return LETTER

    engine = make_engine(script, max_sequences=1)
    broken, waiting = engine.submit([BROKEN], GREEDY), engine.submit([1, 2], GREEDY)
    gate.set()
    with pytest.raises(EngineError, match="a kernel broke"):
        broken.result()
    assert waiting.result().token_ids == (LETTER,) * 20
    assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total


def test_a_failing_step_leaves_a_half_computed_prompt_alone() -> None:
    vocabulary = Vocabulary()
    normal = arithmetic(vocabulary)
    started, queued = threading.Event(), threading.Event()
    prompt = [3] * 64

    def script(context: tuple[int, ...]) -> int:
        if context[0] != BROKEN:
            return normal(context)
        started.set()
        wait(queued)
        if len(context) == 3:
            raise RuntimeError("a kernel broke")
        return LETTER

    # The reply's second token is drawn beside the prompt's first chunk, and its third while the chunk is paid back.
    with recorded(script, vocabulary, prefill_chunk=8, decode_share=1.0) as (engine, runtime):
        broken = engine.submit([BROKEN], GREEDY)
        wait(started)
        other = engine.submit(prompt, SHORT)
        queued.set()
        with pytest.raises(EngineError, match="a kernel broke"):
            broken.result()
        first = normal(tuple(prompt))
        assert other.result().token_ids == (first, normal((*prompt, first)))
        assert [batch.context_len.tolist() for batch in runtime.batches[:4]] == [[1], [2, 8], [3], [16]]
        assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total


def test_a_failing_choice_ends_its_siblings_that_wait_and_is_told_once(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        if BROKEN in context:
            raise RuntimeError("a kernel broke")
        return LETTER

    engine = make_engine(script, max_sequences=2)
    params = SamplingParams(temperature=0.0, max_tokens=5, n=6)
    broken = engine.submit([BROKEN], params, request_id="mine")
    other = engine.submit([1], params)
    told = []
    broken.notify(lambda: told.append(broken))
    gate.set()
    with pytest.raises(EngineError, match="a kernel broke"):
        broken.result()
    assert [output.token_ids for output in other.result().outputs] == [(LETTER,) * 5] * 6
    assert engine.submit([1], SHORT, request_id="mine").result().finish_reason == "length"
    assert len(told) == 1
    assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total


def test_a_finished_requests_handle_does_not_cancel_another_of_its_id(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        if context[0] == 2:
            wait(gate)
        return LETTER

    engine = make_engine(script)
    first = engine.submit([1], GREEDY, request_id="same")
    first.result()
    second = engine.submit([2], GREEDY, request_id="same")
    assert not first.cancel()
    gate.set()
    assert second.result().finish_reason == "length"
    assert not second.cancel()


def test_a_handle_cancels_its_own_request(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        return LETTER

    engine = make_engine(script)
    one, two = (engine.submit([1], GREEDY) for _ in range(2))
    assert one.cancel()
    gate.set()
    assert one.result().finish_reason == "cancelled"
    assert two.result().finish_reason == "length"


def test_cancelling_ends_only_the_choices_that_still_run(make_engine) -> None:
    vocabulary = Vocabulary()
    gate = threading.Event()
    either = np.full(vocabulary.size, -np.inf, dtype=np.float32)
    either[[LETTER, vocabulary.end]] = 0.0

    def script(context: tuple[int, ...]) -> int | np.ndarray:
        if len(context) == 1:
            return either
        wait(gate)
        return LETTER

    engine = make_engine(script, vocabulary)
    handle = engine.submit([1], SamplingParams(temperature=1.0, seed=3, n=8, max_tokens=900))
    events = [handle.next_event() for _ in range(8)]
    assert handle.cancel()
    gate.set()
    while not handle.done:
        events.append(handle.next_event())
    assert sorted(event.index for event in events if event.finish_reason is not None) == list(range(8))
    reasons = {output.finish_reason for output in handle.output().outputs}
    assert reasons == {"stop", "cancelled"}


def test_an_id_is_free_and_so_are_the_blocks_once_the_result_is_there(make_engine, quick_switches: None) -> None:
    engine = make_engine(lambda context: LETTER)
    params = SamplingParams(temperature=0.0, max_tokens=1, n=2)
    for _ in range(500):
        assert engine.submit([1], params, request_id="same").result().finish_reason == "length"
        statistics = engine.statistics()
        assert statistics.kv_blocks_free == statistics.kv_blocks_total
        assert (statistics.running, statistics.waiting) == (0, 0)


def test_an_id_is_free_once_its_request_has_failed(make_engine, quick_switches: None) -> None:
    vocabulary = Vocabulary()
    nothing = np.full(vocabulary.size, np.nan, dtype=np.float32)
    engine = make_engine(lambda context: nothing, vocabulary)
    for _ in range(200):
        with pytest.raises(EngineError, match="not numbers"):
            engine.submit([1], SHORT, request_id="same").result()
        assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total


def test_a_reader_that_fails_harms_nobody(make_engine) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        return LETTER

    def fail() -> None:
        raise RuntimeError("the reader is gone")

    engine = make_engine(script)
    harmed, other = engine.submit([1], GREEDY), engine.submit([2], GREEDY)
    harmed.notify(fail)
    gate.set()
    for handle in (other, harmed):
        assert handle.result().token_ids == (LETTER,) * 20
    assert engine.statistics().alive
    assert engine.submit([1], SHORT).result().finish_reason == "length"


def test_cancelling_races_with_submitting(make_engine, quick_switches: None) -> None:
    engine = make_engine(lambda context: LETTER, max_sequences=2)
    submitted: queue.SimpleQueue[RequestHandle | None] = queue.SimpleQueue()
    reasons: set[str] = set()

    def cancel() -> None:
        for handle in iter(submitted.get, None):
            handle.cancel()
            engine.cancel("same")

    canceller = threading.Thread(target=cancel)
    canceller.start()
    try:
        for _ in range(2000):
            handle = engine.submit([1], SHORT, request_id="same")
            submitted.put(handle)
            reasons.add(handle.result().finish_reason)
    finally:
        submitted.put(None)
        canceller.join()
    assert reasons <= {"cancelled", "length"}
    statistics = engine.statistics()
    assert statistics.alive
    assert statistics.requests_total == 2000
    assert statistics.kv_blocks_free == statistics.kv_blocks_total
    assert engine.submit([1], SHORT, request_id="same").result().finish_reason == "length"
