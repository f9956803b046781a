"""A real server on a free port, and a small client for it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pocketllm.server.http_server import HTTPServer
from pocketllm.server.state import ServerState

THREADS = 24
PATIENCE = 10.0

Serve = Callable[..., str]
"""Serves an engine (None: not loaded yet) with the server's arguments; gives the address."""


class Gate:
    """A script that writes one letter for ever, and lets no step pass while it is shut."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, context: tuple[int, ...]) -> int:
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return ord("a")


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until `holds` does, at most `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        pause.wait(0.01)


@contextmanager
def running(state: ServerState) -> Iterator[str]:
    """A server over `state`; gives its address, such as ``127.0.0.1:4711``."""
    server = HTTPServer(state, threads=THREADS)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url.removeprefix("http://")
    finally:
        server.stop()
        thread.join()


@dataclass(frozen=True)
class Answer:
    """A response that was read to its end."""

    status: int
    headers: http.client.HTTPMessage
    data: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.data)

    @property
    def error(self) -> Any:
        """The body's error."""
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The body's events, parsed; the last may be the text ``[DONE]``."""
        assert self.status == 200, self.data
        assert self.headers["Content-Type"].startswith("text/event-stream")
        blocks = [block for block in self.data.decode().split("\n\n") if block and not block.startswith(":")]
        assert all(block.startswith("data: ") for block in blocks)
        texts = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


def call(address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own; `body` is bytes, or sent as JSON."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


@contextmanager
def opened(
    address: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPConnection]:
    """A POST that was sent and whose response nobody has read; leaving closes the connection."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request("POST", path, json.dumps(body).encode(), headers or {})
        yield connection
    finally:
        connection.close()
