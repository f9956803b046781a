"""The process: it listens before it can serve, says what it does, and ends when it is told to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.server.config import ServerArgs
from pocketllm.server.serve import serve
from tests.served import PATIENCE, call

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, threading
from pocketllm.config import EngineArgs
from pocketllm.errors import CheckpointError
from pocketllm.server.config import ServerArgs
from pocketllm.server.serve import serve
from tests.scripted import scripted_engine

def load(args, report):
    report("weights", 0, 1)
    if args.model == "broken":
        raise CheckpointError("the file is cut short")
    if args.model == "slow":
        while not threading.Event().wait(0.01):
            report("weights", 0, 1)
    return scripted_engine(lambda context: threading.Event().wait(0.003) or ord("a"))

sys.exit(serve(EngineArgs(model=sys.argv[1], max_queue=4), ServerArgs(port=int(sys.argv[2])), load))
"""


@contextmanager
def process(model: str, port: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, model, str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str], part: str) -> str:
    """The next line of stderr that has `part`."""
    assert process.stderr is not None
    for text in process.stderr:
        if part in text:
            return text
    raise AssertionError(f"the process ended without saying {part!r}")


def address_in(text: str) -> str:
    return text.split("http://")[1].split()[0].rstrip(",")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_serving_process_and_its_streams(number: signal.Signals) -> None:
    with process("any") as server:
        address = address_in(line(server, "ready"))
        host, port = address.split(":")
        body = b'{"prompt": "x", "stream": true}'
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            data = connection.recv(65536)
            assert b"200 OK" in data
            server.send_signal(number)
            while piece := connection.recv(65536):
                data += piece
        assert b'"finish_reason":"cancelled"' in data
        assert server.wait(PATIENCE) == 0


def test_it_listens_while_it_loads_and_can_be_ended_there() -> None:
    with process("slow") as server:
        address = address_in(line(server, "listening"))
        assert call(address, "GET", "/health").status == 503
        server.terminate()
        assert server.wait(PATIENCE) == 0


def test_a_model_that_cannot_be_loaded_ends_the_process() -> None:
    with process("broken") as server:
        assert "the file is cut short" in line(server, "cannot load")
        assert server.wait(PATIENCE) == 1


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, process("any", taken.getsockname()[1]) as server:
        assert server.wait(PATIENCE) == 1
        assert server.stderr is not None
        (text,) = server.stderr.read().splitlines()
        assert "cannot listen on 127.0.0.1" in text
        assert "choose another port with --port" in text


@pytest.mark.parametrize("host", ["a b", "[::1", "127.0.0.1:80", "nonsense.invalid", "127.0.0.1 ", "x" * 300, "a\0b"])
def test_a_host_that_is_no_address_is_named(host: str) -> None:
    def load(*_: object) -> Any:
        raise AssertionError("nothing is loaded")

    with pytest.raises(ConfigurationError) as caught:
        serve(EngineArgs(), ServerArgs(host=host, port=0), load)
    assert f"host is {host!r}" in str(caught.value)
    assert "such as 127.0.0.1" in str(caught.value)
