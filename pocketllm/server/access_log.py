"""One line of JSON for each request: which, how it went, how long it took, and never what was said."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from flask import Flask, Response, g, request

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.json_text import dumps
from pocketllm.types import Usage

log = logging.getLogger(__name__)


class Work(Protocol):
    """What a request has the engine do."""

    client_left: bool

    def usage(self) -> Usage:
        """Tokens taken so far."""


@dataclass(slots=True)
class Record:
    """What is known of a request while it is served.

    Attributes:
        started: `time.monotonic` when it arrived, in seconds.
        request_id: by which it can be found again, where it generates text.
        work: what the engine does for it, or None.
    """

    started: float = field(default_factory=time.monotonic)
    request_id: str | None = None
    work: Work | None = None

    def line(self, method: str | None, route: str | None, status: int) -> dict[str, Any]:
        """The finished request, with its route instead of its path: a client may write anything into a path."""
        usage = None if self.work is None else self.work.usage()
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round((time.monotonic() - self.started) * 1000, 3),
            "prompt_tokens": None if usage is None else usage.prompt_tokens,
            "completion_tokens": None if usage is None else usage.completion_tokens,
            "client_left": self.work is not None and self.work.client_left,
        }


class AccessLog:
    """Writes lines to a place.

    A file is opened for every line, so that it can be moved away while the server runs.
    """

    def __init__(self, place: str) -> None:
        """Take a place: ``off``, ``stderr`` or a path; ConfigurationError when the file cannot be written."""
        self._place = place
        if place not in ("off", "stderr"):
            try:
                self._append("")
            except OSError as error:
                raise ConfigurationError(f"access_log: {place} cannot be written: {error.strerror or error}") from None

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, from any thread."""
        if self._place == "off":
            return
        text = dumps(line) + "\n"
        if self._place == "stderr":
            sys.stderr.write(text)
            return
        try:
            self._append(text)
        except OSError as error:  # no reason to fail a request that was served
            log.error("the access log %s cannot be written: %s", self._place, error)

    def _append(self, text: str) -> None:
        with open(self._place, "a", encoding="utf-8") as file:
            file.write(text)


def install(app: Flask, access_log: AccessLog) -> None:
    """Have every request of `app` written down once its response is closed."""

    @app.before_request
    def begin() -> None:
        g.access_record = Record()

    @app.after_request
    def end(response: Response) -> Response:
        route = None if request.url_rule is None else request.url_rule.rule
        record: Record = g.access_record
        facts = (request.method, route, response.status_code)
        response.call_on_close(lambda: access_log.write(record.line(*facts)))
        return response


def note(request_id: str, work: Work) -> None:
    """Tell the current request's record what is done for it."""
    g.access_record.request_id = request_id
    g.access_record.work = work
