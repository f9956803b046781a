"""What HTTP itself asks for: paths, methods, bodies, headers, and the routes without a model."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest

from pocketllm.server import app
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState
from tests.scripted import scripted_engine
from tests.served import PATIENCE, Serve, call, running

GENERATING = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1/models/", "/v1/completions/", "/%ff%00"])
def test_an_unknown_path_is_a_404(alphabet: str, path: str) -> None:
    answer = call(alphabet, "GET", path)
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("path", GENERATING)
def test_a_wrong_method_is_a_405(alphabet: str, path: str) -> None:
    answer = call(alphabet, "GET", path)
    assert answer.status == 405
    assert "POST" in answer.headers["Allow"]
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b'{"tools":' + b"[" * 3000,
        b'{"x":' + b"[" * 100_000,
        b'{"messages":[{"role":"user","content":' + b"[" * 3000 + b"]" * 3000 + b"}]}",
        b'{"response_format":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"prompt": "x", "prompt": "y"}',
    ],
    ids=lambda body: body[:24],
)
def test_a_broken_body_is_a_400(alphabet: str, path: str, body: bytes) -> None:
    answer = call(alphabet, "POST", path, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert call(alphabet, "GET", "/health").status == 200


@pytest.mark.parametrize("path", [*GENERATING, "/health"])
def test_options_are_a_wrong_method_too(alphabet: str, path: str) -> None:
    answer = call(alphabet, "OPTIONS", path)
    assert answer.status == 405
    assert "OPTIONS" not in answer.headers["Allow"]


def test_the_content_type_is_not_asked_for(alphabet: str) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        answer = call(alphabet, "POST", GENERATING[0], {"prompt": "ABC"}, {"Content-Type": kind})
        assert answer.status == 200


def exchange(address: str, *pieces: bytes) -> tuple[int, dict[str, str], Any]:
    """Send raw bytes; the status, headers and JSON that come back."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        for piece in pieces:
            connection.sendall(piece)
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"Content-Length: 1001\r\n\r\n", *[b"x" * 1001]],
        [b"Content-Length: 30000000\r\n\r\n", *[b"x" * 1_000_000] * 30],
        [b"Transfer-Encoding: chunked\r\n\r\n", *[b"1000\r\n" + b"x" * 4096 + b"\r\n"] * 2000],
        [b"Transfer-Encoding: chunked\r\n\r\n", b"1000000\r\n", *[b"x" * 1_000_000] * 10],
    ],
    ids=["just above", "far above", "chunks without end", "a chunk without end"],
)
def test_a_body_above_the_limit_is_a_413_that_arrives(serve: Serve, pieces: list[bytes]) -> None:
    address = serve(scripted_engine(lambda context: 256), max_body_mb=0.001)
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    status, headers, body = exchange(address, start + pieces[0], *pieces[1:])
    assert status == 413
    assert headers["Content-Type"] == "application/json"
    assert body["error"]["type"] == "invalid_request_error"
    assert call(address, "GET", "/health").status == 200


def test_a_body_of_exactly_the_limit_is_read(serve: Serve) -> None:
    address = serve(scripted_engine(lambda context: 256), max_body_mb=0.001)
    for size, status in ((999, 200), (1000, 200), (1001, 413)):
        body = b'{"prompt": "x"}'
        assert call(address, "POST", "/v1/completions", body + b" " * (size - len(body))).status == status


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 300_000 + b"\r\n\r\n", 431),
        (b"GARBAGE\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    ],
    ids=["headers too large", "no request", "no length", "no chunk", "no such encoding"],
)
def test_broken_http_is_refused_in_the_envelope(alphabet: str, request_bytes: bytes, expected: int) -> None:
    status, headers, body = exchange(alphabet, request_bytes)
    assert status == expected
    assert headers["Content-Type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not body["error"]["message"].endswith("..")


def test_while_the_model_is_loaded(serve: Serve) -> None:
    address = serve(None)
    for path in ("/health", "/v1/health"):
        answer = call(address, "GET", path)
        assert (answer.status, answer.json) == (
            503,
            {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}},
        )
    assert call(address, "GET", "/alive").status == 200
    assert call(address, "GET", "/ready").status == 503
    for method, path in (("GET", "/v1/models"), ("POST", GENERATING[0]), ("POST", GENERATING[1])):
        answer = call(address, method, path, {"broken": True} if method == "POST" else None)
        assert (answer.status, answer.error["type"]) == (503, "unavailable_error")
        assert int(answer.headers["Retry-After"]) > 0
    assert call(address, "GET", "/v1/nothing").status == 404


def test_loading_reports_its_progress_and_its_failure() -> None:
    state = ServerState(ServerArgs(port=0), max_prompts=1)
    with running(state) as address:
        state.report("weights", 3, 7)
        assert call(address, "GET", "/health").json["progress"] == {"phase": "weights", "done": 3, "total": 7}
        state.fail("the file is cut short")
        answer = call(address, "GET", "/health")
        assert answer.status == 503
        assert "the file is cut short" in answer.error["message"]
        assert "progress" not in answer.json


def test_health_counts(alphabet: str) -> None:
    call(alphabet, "POST", GENERATING[0], {"prompt": "ABC", "max_tokens": 2})
    body = call(alphabet, "GET", "/health").json
    expected = {
        "status": "ok",
        "busy": False,
        "running": 0,
        "waiting": 0,
        "requests_total": 1,
        "prompt_tokens_total": 3,
        "completion_tokens_total": 2,
        "context_length": 1024,
    }
    assert body | expected == body


def test_models(serve: Serve) -> None:
    address = serve(scripted_engine(lambda context: 256), aliases=("nick", "org/nick"))
    body = call(address, "GET", "/v1/models").json
    (model,) = body["data"]
    assert (model["id"], model["aliases"], model["object"]) == ("nick", ["nick", "org/nick"], "model")
    assert model["meta"] == {"n_ctx": 1024, "n_ctx_train": 4096, "n_vocab": 258, "n_embd": 8}
    assert body["models"][0]["name"] == "nick"
    for name in ("nick", "org/nick"):
        assert call(address, "GET", f"/v1/models/{name}").json == model
    assert call(address, "GET", "/v1/models/other").status == 404
    assert call(address, "POST", GENERATING[0], {"prompt": "x"}).json["model"] == "nick"


def test_an_unexpected_exception_stays_on_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scripted_engine(lambda context: 256)
    address = serve(engine)
    monkeypatch.setattr(engine, "encode_prompt", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.ERROR, logger=app.__name__):
        answer = call(address, "POST", GENERATING[0], {"prompt": "x"})
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert "division" not in answer.data.decode()
    assert "ZeroDivisionError" in caplog.text
