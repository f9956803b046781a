"""The access log: one line a request, with its facts and without its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.server.access_log import AccessLog
from tests.scripted import scripted_engine
from tests.served import Serve, call, eventually, opened
from tests.server.test_http import exchange

PATH = "/v1/completions"
SECRET = "SENTINEL"
MEMBERS = {
    "time",
    "request_id",
    "method",
    "route",
    "status",
    "duration_ms",
    "prompt_tokens",
    "completion_tokens",
    "client_left",
}


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The log's lines once there are so many; they are written after the response has been sent."""
    eventually(lambda: path.read_text().count("\n") >= count)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == count
    assert all(line.keys() == MEMBERS for line in found)
    return found


def test_requests_are_written_down(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    address = serve(scripted_engine(lambda context: ord("a")), access_log=str(path))
    body = {"prompt": SECRET, "max_tokens": 3}
    requests: list[tuple[Any, ...]] = [
        ("POST", PATH, body, {"X-Request-Id": "mine", "Authorization": f"Bearer {SECRET}"}),
        ("POST", PATH, body | {"stream": True, "request_id": "yours"}),
        ("POST", PATH, body | {SECRET: 1}),
        ("GET", f"/{SECRET}?key={SECRET}"),
        ("DELETE", f"/v1/requests/{SECRET}"),
    ]
    for count, request in enumerate(requests, start=1):
        call(address, *request)
        found = lines(path, count)
    whole, streamed, refused, unknown, deleted = found
    assert (whole["request_id"], whole["method"], whole["route"], whole["status"]) == ("mine", "POST", PATH, 200)
    assert streamed["request_id"] == "yours"
    for line in (whole, streamed):
        assert (line["prompt_tokens"], line["completion_tokens"], line["client_left"]) == (8, 3, False)
        assert line["duration_ms"] > 0
    assert (refused["status"], refused["prompt_tokens"]) == (400, None)
    assert (unknown["status"], unknown["route"]) == (404, None)
    assert (deleted["status"], deleted["route"]) == (404, "/v1/requests/<path:request_id>")
    assert SECRET not in path.read_text()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_left_is_told(serve: Serve, slow: Any, tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "access.jsonl"
    engine = scripted_engine(slow)
    address = serve(engine, access_log=str(path))
    with opened(address, PATH, {"prompt": "x", "stream": stream}) as connection:
        if stream:
            response = connection.getresponse()
            assert response.read(100)
            response.close()
        else:
            eventually(lambda: engine.statistics().running == 1)
    (line,) = lines(path, 1)
    assert line["client_left"] is True
    assert line["status"] == (200 if stream else 499)
    assert 0 < line["completion_tokens"] < 900


def test_what_the_parser_refuses_is_written_down(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    address = serve(scripted_engine(lambda context: 256), access_log=str(path))
    exchange(address, b"GARBAGE\r\n\r\n")
    (line,) = lines(path, 1)
    assert (line["status"], line["route"]) == (400, None)


def test_a_file_that_is_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    log.write({"n": 1})
    path.rename(tmp_path / "old")
    log.write({"n": 2})
    assert json.loads(path.read_text()) == {"n": 2}


def test_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    AccessLog("stderr").write({"n": 1})
    assert capsys.readouterr().err == '{"n":1}\n'


def test_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    AccessLog("off").write({"n": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        AccessLog(str(tmp_path / "no" / "folder"))
