"""Endings: what a reply still gives out, what is counted, and what is left when the engine closes or dies."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from pocketllm.engine import engine as engine_module
from pocketllm.engine.engine import Engine, EngineStatistics
from pocketllm.engine.request import RequestHandle
from pocketllm.errors import EngineDeadError
from pocketllm.types import SamplingParams
from tests.engine.recording import recorded
from tests.engine.sequences import LETTER
from tests.scripted import Vocabulary, reply_with

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PIECES = Vocabulary(["DEF", "IJ"])
WAIT = 30.0


def wait(event: threading.Event) -> None:
    assert event.wait(WAIT)


def test_text_held_back_as_a_possible_stop_is_given_out_at_the_end_token() -> None:
    with recorded(reply_with(PIECES.ids("DEF", "IJ")), PIECES) as (engine, _):
        result = engine.submit([1], SamplingParams(temperature=0.0, stop=("IJZ",))).result()
    assert (result.text, result.finish_reason) == ("DEFIJ", "stop")
    assert list(result.token_ids) == PIECES.ids("DEF", "IJ")
    assert result.outputs[0].stop_match is None


def test_text_held_back_as_a_possible_stop_is_given_out_when_cancelled() -> None:
    at_the_second, cancelled = threading.Event(), threading.Event()
    tokens = PIECES.ids("DEF", "IJ")

    def script(context: tuple[int, ...]) -> int:
        if len(context) == 2:
            at_the_second.set()
            wait(cancelled)
        return tokens[len(context) - 1]

    with recorded(script, PIECES) as (engine, _):
        handle = engine.submit([1], SamplingParams(temperature=0.0, stop=("IJZ",)))
        wait(at_the_second)
        assert handle.cancel()
        cancelled.set()
        result = handle.result()
    assert (result.text, result.finish_reason) == ("DEFIJ", "cancelled")
    assert list(result.token_ids) == tokens
    assert result.usage.completion_tokens == 2


def test_choices_that_ended_wait_for_nothing() -> None:
    vocabulary = Vocabulary()
    engines: list[Engine] = []
    readings: list[EngineStatistics] = []
    logits = np.full(vocabulary.size, -np.inf, dtype=np.float32)
    logits[[LETTER, vocabulary.end]] = (1.0, 0.0)

    def script(context: tuple[int, ...]) -> np.ndarray:
        readings.append(engines[0].statistics())
        return logits

    with recorded(script, vocabulary, max_sequences=8) as (engine, runtime):
        engines.append(engine)
        result = engine.submit([1], SamplingParams(temperature=1.0, seed=3, n=8, max_tokens=30)).result()
        last = engine.statistics()
    assert len({output.completion_tokens for output in result.outputs}) > 2
    assert [reading.waiting for reading in readings] == [0] * len(readings)
    rows = [len(batch.output_rows) for batch in runtime.batches]
    assert [reading.running for reading in readings] == [count for count in rows for _ in range(count)]
    assert (last.running, last.waiting, last.completion_tokens_total) == (0, 0, result.usage.completion_tokens)


def test_closing_closes_the_runtime_once() -> None:
    with recorded(lambda context: LETTER) as (engine, runtime):
        engine.submit([1], GREEDY).result()
        assert runtime.closed == 0
        engine.close()
        assert runtime.closed == 1
        engine.close()
    assert runtime.closed == 1


def test_an_engine_that_dies_closes_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        return LETTER

    def fail(*_: object) -> None:
        raise MemoryError("gone")

    with recorded(script, max_sequences=1) as (engine, runtime):
        monkeypatch.setattr(engine._scheduler, "account", fail)
        handles = [engine.submit([1], GREEDY) for _ in range(3)]
        gate.set()
        for handle in handles:
            with pytest.raises(EngineDeadError, match="gone"):
                handle.result()
        check_dead(engine, handles)
        engine._thread.join(WAIT)
        assert runtime.closed == 1
        check_dead(engine, handles)
    assert runtime.closed == 1


def check_dead(engine: Engine, handles: Iterable[RequestHandle]) -> None:
    assert not any(handle.cancel() for handle in handles)
    statistics = engine.statistics()
    assert not statistics.alive
    assert (statistics.running, statistics.waiting) == (0, 0)
    assert 0 <= statistics.kv_blocks_free <= statistics.kv_blocks_total
    with pytest.raises(EngineDeadError):
        engine.submit([1], GREEDY)


def test_a_step_that_hangs_does_not_keep_the_engine_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLOSING_SECONDS", 0.2)
    hangs, gate = threading.Event(), threading.Event()

    def script(context: tuple[int, ...]) -> int:
        hangs.set()
        wait(gate)
        return LETTER

    with recorded(script, max_sequences=1) as (engine, runtime):
        handles = [engine.submit([1], GREEDY) for _ in range(3)]
        try:
            wait(hangs)
            engine.close()
            for handle in handles:
                with pytest.raises(EngineDeadError, match="closed while a step hung"):
                    handle.result()
            check_dead(engine, handles)
        finally:
            gate.set()
        engine._thread.join(WAIT)
        assert not engine._thread.is_alive()
        assert runtime.closed == 1
        check_dead(engine, handles)


def test_readings_stay_sound_when_a_step_returns_after_the_engine_was_given_up() -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        return LETTER

    with recorded(script, max_sequences=2, step_timeout=0.2) as (engine, runtime):
        handles = [engine.submit([1], SamplingParams(temperature=0.0, n=3)) for _ in range(2)]
        for handle in handles:
            with pytest.raises(EngineDeadError, match="has not come back"):
                handle.result()
        check_dead(engine, handles)
        gate.set()
        engine._thread.join(WAIT)
        check_dead(engine, handles)
        assert runtime.closed == 1


def test_cancelling_twice_ends_each_choice_once() -> None:
    running, cancelled = threading.Event(), threading.Event()

    def script(context: tuple[int, ...]) -> int:
        running.set()
        wait(cancelled)
        return LETTER

    with recorded(script) as (engine, _):
        handle = engine.submit([1], SamplingParams(temperature=0.0, n=2, max_tokens=9))
        wait(running)
        assert handle.cancel()
        handle.cancel()
        cancelled.set()
        ends = [event.index for event in handle.events() if event.finish_reason is not None]
    assert ends == [0, 1]
    assert handle.output().outputs[1].timing is not None


def test_the_runtime_is_closed_once_a_step_returns_that_was_given_up() -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        return LETTER

    with recorded(script, step_timeout=0.2) as (engine, runtime):
        with pytest.raises(EngineDeadError, match="has not come back"):
            engine.submit([1], SamplingParams(temperature=0.0, max_tokens=9)).result()
        gate.set()
        engine._thread.join(5)
        assert runtime.closed == 1


def test_the_id_of_a_cancelled_request_is_free_at_once() -> None:
    gate = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        wait(gate)
        return LETTER

    with recorded(script) as (engine, _):
        first = engine.submit([1], GREEDY, request_id="x")
        assert first.cancel()
        second = engine.submit([1], GREEDY, request_id="x")
        assert not first.cancel()
        gate.set()
        assert first.result().finish_reason == "cancelled"
        assert second.result().finish_reason == "length"
