"""From a generation to an HTTP response, whole or streamed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from flask import Response

from pocketllm.errors import PocketLLMError
from pocketllm.protocol.errors import error_reply
from pocketllm.protocol.json_text import dumps
from pocketllm.protocol.openai.reply import Answer
from pocketllm.server import sse
from pocketllm.server.generation import ClientGoneError, Generation
from pocketllm.types import FinishReason, TokenEvent, Usage

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this response; the status tells its own layers what happened."""


class Reply(Protocol):
    """A dialect's wording of a generation."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response without streaming."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, sent before its first token."""

    def delta(self, index: int, text: str) -> dict[str, Any]:
        """More of a choice's text."""

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """A choice's last chunk."""

    def usage(self, usage: Usage, seed: int | None) -> dict[str, Any]:
        """The chunk after the last choice's end."""


def json_response(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(dumps(body).encode(), status, dict(headers or {}), content_type="application/json")


def error_response(error: Exception) -> Response:
    """The response that tells of `error`."""
    reply = error_reply(error)
    return json_response(reply.body, reply.status, reply.headers)


def whole_response(generation: Generation, reply: Reply) -> Response:
    """Wait for the generation, then answer; raises as `Generation.wait`."""
    try:
        return json_response(reply.whole(generation.wait()))
    except ClientGoneError:
        return Response(status=CLIENT_CLOSED_REQUEST)


def streamed_response(generation: Generation, reply: Reply, *, includes_usage: bool, ping_interval: float) -> Response:
    """Answer while the generation runs."""
    pieces = _stream(generation, reply, includes_usage)
    return Response(_with_pings(pieces, ping_interval), headers=sse.HEADERS)


def _stream(generation: Generation, reply: Reply, includes_usage: bool) -> Iterator[bytes]:
    """The stream's pieces; empty ones pass the time."""
    try:
        openings = [reply.opening(index) for index in range(generation.choice_count)]
        # The first piece takes the headers along, so there has to be one even where nothing is to be said yet.
        yield b"".join(sse.data(opening) for opening in openings if opening is not None) or sse.PING
        for event in generation.events():
            yield b"" if event is None else _event_data(generation.choice_index(event), event, reply)
        if includes_usage:
            answer = generation.answer()
            yield sse.data(reply.usage(answer.usage, answer.seed))
        yield sse.DONE
    except ClientGoneError:
        return
    except PocketLLMError as error:
        yield sse.data(error_reply(error).body)
    except Exception as error:
        log.exception("a stream failed")
        yield sse.data(error_reply(error).body)


def _event_data(index: int, event: TokenEvent, reply: Reply) -> bytes:
    delta = sse.data(reply.delta(index, event.text)) if event.text else b""
    return delta if event.finish_reason is None else delta + sse.data(reply.finish(index, event.finish_reason))


def _with_pings(pieces: Iterator[bytes], interval: float) -> Iterator[bytes]:
    """`pieces` without the empty ones, and a ping whenever nothing was sent for `interval` seconds."""
    sent_at = time.monotonic()
    for piece in pieces:
        if not piece and time.monotonic() - sent_at < interval:
            continue
        yield piece or sse.PING
        sent_at = time.monotonic()
