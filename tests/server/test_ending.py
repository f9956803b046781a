"""Requests that end early: clients that leave, cancellation, time limits, failing engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from pocketllm.engine.engine import Engine
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState
from tests.scripted import scripted_engine
from tests.served import PATIENCE, Gate, Serve, call, eventually, opened, running

PATH = "/v1/completions"
Script = Callable[[tuple[int, ...]], int]


def idle(engine: Engine) -> bool:
    statistics = engine.statistics()
    return statistics.running == statistics.waiting == 0 and statistics.kv_blocks_free == statistics.kv_blocks_total


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_frees_its_place(serve: Serve, slow: Script, stream: bool, n: int) -> None:
    engine = scripted_engine(slow, max_sequences=1)
    address = serve(engine)
    with opened(address, PATH, {"prompt": "x", "stream": stream, "n": n}) as connection:
        if stream:
            response = connection.getresponse()
            assert response.read(100)
            response.close()
        else:
            eventually(lambda: engine.statistics().running == 1)
    eventually(lambda: idle(engine))
    assert call(address, "POST", PATH, {"prompt": "y", "max_tokens": 2}).json["choices"][0]["text"] == "aa"
    assert engine.statistics().completion_tokens_total < 900


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_the_queue_is_never_computed(serve: Serve, gate: Gate, stream: bool) -> None:
    engine = scripted_engine(gate, max_sequences=1)
    address = serve(engine)
    with opened(address, PATH, {"prompt": "x", "max_tokens": 3}) as first:
        assert gate.reached.wait(PATIENCE)
        with opened(address, PATH, {"prompt": "y", "stream": stream, "max_tokens": 3, "request_id": "second"}):
            eventually(lambda: engine.statistics().waiting == 1)
        # The engine is held inside a step: only the register can tell that the second request has ended.
        eventually(lambda: call(address, "DELETE", "/v1/requests/second").status == 404)
        gate.opened.set()
        assert json.load(first.getresponse())["choices"][0]["text"] == "aaa"
    eventually(lambda: idle(engine))
    assert engine.statistics().completion_tokens_total == 3


def test_streams_that_end_and_streams_that_are_left_leak_nothing(serve: Serve, slow: Script) -> None:
    engine = scripted_engine(slow)
    address = serve(engine)

    def leave(number: int) -> None:
        with opened(address, PATH, {"prompt": "x", "stream": True}) as connection:
            response = connection.getresponse()
            response.read(50 * (number % 4) + 1)
            response.close()

    def stay(number: int) -> None:
        events = call(address, "POST", PATH, {"prompt": "y", "stream": True, "max_tokens": number % 4 + 1}).events
        assert events[-1] == "[DONE]"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: (stay if number % 2 else leave)(number), range(40)))
    eventually(lambda: idle(engine))
    assert engine.statistics().requests_total == 40


@pytest.mark.parametrize(
    ("where", "stream"),
    [("body", False), ("body", True), ("header", False), ("header", True), ("response", True)],
)
def test_a_request_can_be_cancelled_by_any_of_its_ids(serve: Serve, gate: Gate, where: str, stream: bool) -> None:
    engine = scripted_engine(gate)
    address = serve(engine)
    body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "stream": stream}
    if where == "body":
        body["request_id"] = "mine"
    headers = {"X-Request-Id": "mine"} if where == "header" else {}
    with opened(address, PATH, body, headers) as connection:
        eventually(lambda: engine.statistics().requests_total == 2)
        response = connection.getresponse() if stream else None
        request_id = response.headers["X-Request-Id"] if response else "mine"
        assert (request_id == "mine") is (where != "response")
        deleted = call(address, "DELETE", f"/v1/requests/{request_id}")
        assert (deleted.status, deleted.json) == (200, {"id": request_id, "cancelled": True})
        gate.opened.set()
        data = (response or connection.getresponse()).read().decode()
    assert data.count('"finish_reason":"cancelled"') == 4
    assert data.endswith("data: [DONE]\n\n") is stream
    assert call(address, "DELETE", f"/v1/requests/{request_id}").status == 404
    eventually(lambda: idle(engine))


def test_an_active_id_cannot_be_taken_again(serve: Serve, gate: Gate) -> None:
    address = serve(scripted_engine(gate))
    body = {"prompt": "x", "max_tokens": 1}
    with opened(address, PATH, body | {"request_id": "mine"}) as connection:
        assert gate.reached.wait(PATIENCE)
        second = call(address, "POST", PATH, body, {"X-Request-Id": "mine"})
        assert (second.status, second.error["code"]) == (409, "request_id_active")
        gate.opened.set()
        response = connection.getresponse()
        response.read()
        assert response.headers["X-Request-Id"] == "mine"
    assert call(address, "POST", PATH, body | {"request_id": "mine"}).status == 200


@pytest.mark.parametrize("header", ["", "a b", "\xe9", "a" * 129])
def test_an_unusable_request_id_header_is_refused(alphabet: str, header: str) -> None:
    answer = call(alphabet, "POST", PATH, {"prompt": "ABC"}, {"X-Request-Id": header})
    assert (answer.status, answer.error["param"]) == (400, "X-Request-Id")


def test_time_is_over_before_any_choice(serve: Serve, slow: Script) -> None:
    engine = scripted_engine(slow)
    address = serve(engine)
    answer = call(address, "POST", PATH, {"prompt": "x", "timeout": 0.05})
    assert (answer.status, answer.error["type"]) == (504, "timeout_error")
    *_, last = call(address, "POST", PATH, {"prompt": "x", "timeout": 0.05, "stream": True}).events
    assert last["error"]["type"] == "timeout_error"
    eventually(lambda: idle(engine))


def test_choices_that_arrived_in_time_are_an_answer(serve: Serve) -> None:
    pace = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        if context[0] == ord("q"):
            return 256 if len(context) > 2 else ord("a")
        pace.wait(0.003)
        return ord("b")

    engine = scripted_engine(script, prefill_chunk=64)
    address = serve(engine, request_timeout=1.0)
    body = call(address, "POST", PATH, {"prompt": ["x", "q"], "timeout": 30}).json
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(1, "aa")]
    eventually(lambda: idle(engine))


def test_a_full_queue_says_when_to_come_again(serve: Serve, gate: Gate) -> None:
    engine = scripted_engine(gate, max_sequences=1, max_queue=1)
    address = serve(engine)
    body = {"prompt": "x", "max_tokens": 1}
    with opened(address, PATH, body), ExitStack() as stack:
        assert gate.reached.wait(PATIENCE)
        stack.enter_context(opened(address, PATH, body))
        eventually(lambda: engine.statistics().waiting == 1)
        for stream in (False, True):
            answer = call(address, "POST", PATH, body | {"stream": stream})
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) > 0
            assert answer.error["type"] == "rate_limit_error"


def test_a_failing_step_is_an_error_of_its_requests_alone(serve: Serve) -> None:
    def script(context: tuple[int, ...]) -> int:
        if context[0] == ord("!") and len(context) > 3:
            raise RuntimeError("a kernel failed")
        return ord("a")

    address = serve(scripted_engine(script))
    answer = call(address, "POST", PATH, {"prompt": "!", "max_tokens": 9})
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    *chunks, last = call(address, "POST", PATH, {"prompt": "!", "max_tokens": 9, "stream": True}).events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "aaa"
    assert last["error"]["type"] == "server_error"
    assert call(address, "GET", "/health").status == 200
    assert call(address, "POST", PATH, {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_dead_engine_shows(serve: Serve) -> None:
    engine = scripted_engine(lambda context: ord("a"))
    address = serve(engine)
    engine.close()
    for path in ("/health", "/v1/health", "/ready"):
        answer = call(address, "GET", path)
        assert answer.status == 503
        assert answer.error["type"] == "unavailable_error"
    assert call(address, "GET", "/alive").status == 200
    for stream in (False, True):
        assert call(address, "POST", PATH, {"prompt": "x", "stream": stream}).status == 503


def test_long_streams_leave_room_for_short_answers(serve: Serve, gate: Gate) -> None:
    engine = scripted_engine(gate, max_sequences=4, max_queue=12)
    address = serve(engine)
    with ExitStack() as stack:
        for number in range(12):
            stack.enter_context(opened(address, PATH, {"prompt": "x", "stream": True, "request_id": f"r{number}"}))
        eventually(lambda: engine.statistics().requests_total == 12)
        for path in ("/health", "/ready", "/v1/models"):
            assert call(address, "GET", path).status == 200
        assert call(address, "DELETE", "/v1/requests/r0").status == 200


def test_a_waiting_stream_is_kept_alive(serve: Serve, gate: Gate) -> None:
    address = serve(scripted_engine(gate), sse_ping_interval=0.1)
    with opened(
        address,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1},
    ) as connection:
        response = connection.getresponse()
        assert json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
        assert response.readline() == b"\n"
        for _ in range(2):
            assert response.readline() == b": \n"
            assert response.readline() == b"\n"
        gate.opened.set()
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_a_server_that_stops_ends_its_streams(slow: Script) -> None:
    engine = scripted_engine(slow)
    state = ServerState(ServerArgs(port=0), max_prompts=16)
    state.ready(engine)
    with ExitStack() as stack:
        stack.callback(engine.close)
        with running(state) as address:
            connection = stack.enter_context(opened(address, PATH, {"prompt": "x", "stream": True}))
            response = connection.getresponse()
            assert response.read(1)
        assert response.read().endswith(b"data: [DONE]\n\n")
