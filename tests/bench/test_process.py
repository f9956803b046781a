"""Objects in processes of their own: results and errors come back, and no process stays."""

from __future__ import annotations

import pytest

from pocketllm.bench import process
from pocketllm.bench.process import Remote
from pocketllm.errors import EngineError


def test_results_and_errors_come_back() -> None:
    with Remote("bytes", "io:BytesIO", {"initial_bytes": b"abc"}, {"PATH": None}) as remote:
        assert remote.call("read") == b"abc"
        with pytest.raises(EngineError, match=r"bytes: ValueError: negative seek value -1"):
            remote.call("seek", -1)
        assert remote.call("seek", 1) == 1


def test_an_object_that_cannot_be_made(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineError, match="nothing: ModuleNotFoundError: No module named 'nowhere'"):
        Remote("nothing", "nowhere:Nothing", {})
    assert "Traceback" in capfd.readouterr().err


def test_a_process_that_ends() -> None:
    with Remote("bytes", "io:BytesIO", {}) as remote:
        remote._process.kill()
        with pytest.raises(EngineError, match="bytes: its process ended"):
            remote.call("read")


def test_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with Remote("waiting", "selectors:DefaultSelector", {}) as remote:
        monkeypatch.setattr(process, "CALL_SECONDS", 0.0)
        with pytest.raises(EngineError, match="waiting: no answer within 0 seconds"):
            remote.call("select", 0.5)
