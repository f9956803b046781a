"""The load generator against servers of scripted models, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pocketllm.bench.__main__ import main
from pocketllm.bench.server_process import loopback_address, model_id, served
from pocketllm.bench.streams import Client
from pocketllm.errors import ConfigurationError, EngineError
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState
from tests.scripted import Vocabulary, arithmetic, scripted_engine
from tests.served import running

Script = Callable[[tuple[int, ...]], int]


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[Callable[[Script], str]]:
    """Serves a script; gives its address."""
    with ExitStack() as cleanup:

        def start(script: Script) -> str:
            state = ServerState(ServerArgs(port=0), max_prompts=16)
            engine = scripted_engine(script)
            cleanup.callback(engine.close)
            state.ready(engine)
            return cleanup.enter_context(running(state))

        yield start


def load(address: str, stem: Path, *flags: str) -> dict:
    command = ["load", "--url", f"http://{address}", "--streams", "3", "--tokens", "5", "--repeat", "2"]
    assert main([*command, "--out", str(stem), *flags]) == 0
    return json.loads(stem.with_suffix(".json").read_text())


def test_figures(address: Callable[[Script], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = load(address(arithmetic(Vocabulary())), tmp_path / "load")
    figures = record["servers"]["given by --url"]
    assert figures["texts that differ from their solo runs"] == [0, 0]
    assert figures["tokens/s"]["median"] > 0
    assert 0 < figures["first token, ms"]["p50"] <= figures["first token, ms"]["p99"]
    assert 0 <= figures["between tokens, ms"]["p50"] <= figures["between tokens, ms"]["p99"]
    assert record["model"] == "scripted"
    assert capsys.readouterr().out.startswith("# scripted served to 3 streams\n")


def test_texts_that_load_changes_are_counted(address: Callable[[Script], str], tmp_path: Path) -> None:
    calls = iter(range(10**6))
    record = load(address(lambda context: 97 + next(calls) // 8 % 26), tmp_path / "load")
    assert sum(record["servers"]["given by --url"]["texts that differ from their solo runs"]) > 0


def test_time_is_bounded(address: Callable[[Script], str]) -> None:
    client = Client(address(lambda context: 97), "scripted", 5, time.monotonic() - 1)
    with pytest.raises(EngineError, match="give more --seconds"):
        client.stream("abc")


def test_a_refusal_is_told(address: Callable[[Script], str]) -> None:
    client = Client(address(lambda context: 97), "scripted", 10**6, time.monotonic() + 60)
    with pytest.raises(EngineError, match="status 400"):
        client.stream("abc")


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://127.0.0.1:80", "127.0.0.1:80"), ("http://localhost:1", "localhost:1"), ("http://[::1]:9", "[::1]:9")],
)
def test_addresses_of_this_machine(url: str, host: str) -> None:
    assert loopback_address(url) == host


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:80",
        "http://example.org:80",
        "https://127.0.0.1:80",
        "http://127.0.0.1",
        "127.0.0.1:80",
        "http://",
    ],
)
def test_addresses_of_other_machines_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="an address of this machine"):
        loopback_address(url)


@pytest.mark.parametrize("flag", ["streams", "tokens", "repeat", "seconds"])
def test_work_is_bounded(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", f"--{flag}", "99999"]) == 1
    assert f"--{flag} is 99999: give at most" in capsys.readouterr().err


def test_nobody_answers() -> None:
    with pytest.raises(EngineError, match="names no model"):
        model_id("127.0.0.1:1")


def test_a_server_of_our_own(tiny: Path, tmp_path: Path) -> None:
    stem = tmp_path / "load"
    sizes = ["--streams", "2", "--tokens", "3", "--repeat", "1", "--threads", "1"]
    assert main(["load", "--model", str(tiny), "--backend", "torch", *sizes, "--out", str(stem)]) == 0
    assert json.loads(stem.with_suffix(".json").read_text())["model"] == "tiny"


def test_a_server_that_does_not_start() -> None:
    with (
        pytest.raises(EngineError, match=r"the server ended with status 1; it said: .*nowhere"),
        served(["--model", "/nowhere"]),
    ):
        pass
