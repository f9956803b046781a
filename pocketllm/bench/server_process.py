"""A server to load: one that is started for it on a free port of this machine, or one that runs already."""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pocketllm.errors import ConfigurationError, EngineError

START_SECONDS = 300.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1

_LISTENING = re.compile(r"listening at http://(\S+?),")


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """Run ``pocketllm serve`` with these flags, and end it; gives its address once the model is loaded.

    Raises:
        EngineError: it ended, or was not ready in `START_SECONDS`; the message has what it said last.
    """
    command = [sys.executable, "-m", "pocketllm", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        try:
            yield _ready_address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_address(process: subprocess.Popen[bytes], log: Any) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = _LISTENING.search(_said(log))
        if found and get(found[1], "/health")[0] == 200:
            return found[1]
        time.sleep(POLL_SECONDS)
    what = "was not ready in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise EngineError(f"the server {what}; it said: {' | '.join(_said(log).splitlines()[-5:])}")


def _said(log: Any) -> str:
    # The child writes at the same offset of the same open file, so it is put back to the end.
    log.seek(0)
    text: str = log.read()
    return text


def loopback_address(url: str) -> str:
    """``host:port`` of a URL on this machine.

    Raises:
        ConfigurationError: it is none: load is made for this machine only.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
        loopback = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        port, loopback = None, False
    if parts.scheme != "http" or port is None or not loopback:
        raise ConfigurationError(f"--url {url}: give an address of this machine, such as http://127.0.0.1:8000")
    return parts.netloc


def get(address: str, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nobody answers."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def model_id(address: str) -> str:
    """The first model of ``GET /v1/models``; EngineError when there is none."""
    status, body = get(address, "/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EngineError(
            f"http://{address}/v1/models answers {status} and names no model: is the server ready?"
        ) from None
