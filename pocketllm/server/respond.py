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
from pocketllm.protocol.openai.answer import Answer
from pocketllm.server import sse
from pocketllm.server.generation import ClientGoneError, Generation
from pocketllm.types import FinishReason, TokenEvent

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this response; the status tells its own layers what happened."""


class Reply(Protocol):
    """A dialect's wording of a generation."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response without streaming."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A choice's chunks before its first token."""

    def delta(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """The chunks of an event."""

    def finish(self, index: int, reason: FinishReason, answer: Answer | None) -> dict[str, Any]:
        """A choice's last chunk; with the whole answer where it is the last one that has choices."""

    def usage(self, answer: Answer) -> dict[str, Any]:
        """The chunk after the last choice's end."""


def json_response(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(dumps(body).encode(), status, dict(headers or {}), content_type="application/json")


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
        openings = (chunk for index in range(generation.choice_count) for chunk in reply.opening(index))
        # The first piece takes the headers along, so there has to be one even where nothing is to be said yet.
        yield b"".join(map(sse.data, openings)) or sse.PING
        for event in generation.events():
            yield b"" if event is None else b"".join(map(sse.data, _chunks(generation, event, reply, includes_usage)))
        if includes_usage:
            yield sse.data(reply.usage(generation.answer()))
        yield sse.DONE
    except ClientGoneError:
        return
    except GeneratorExit:  # the server found nobody to write to
        generation.client_left = True
        raise
    except PocketLLMError as error:
        yield sse.data(error_reply(error).body)
    except Exception as error:
        log.exception("a stream failed")
        yield sse.data(error_reply(error).body)


def _chunks(generation: Generation, event: TokenEvent, reply: Reply, includes_usage: bool) -> list[dict[str, Any]]:
    index = generation.choice_index(event)
    chunks = reply.delta(index, event)
    if event.finish_reason is not None:
        answer = generation.answer() if generation.complete and not includes_usage else None
        chunks.append(reply.finish(index, event.finish_reason, answer))
    return chunks


def _with_pings(pieces: Iterator[bytes], interval: float) -> Iterator[bytes]:
    """`pieces` without the empty ones, and a ping whenever nothing was sent for `interval` seconds."""
    sent_at = time.monotonic()
    for piece in pieces:
        if not piece and time.monotonic() - sent_at < interval:
            continue
        yield piece or sse.PING
        sent_at = time.monotonic()
