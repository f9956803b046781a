"""Server-sent events: how a stream is written."""

from __future__ import annotations

from typing import Any

from pocketllm.protocol.json_text import dumps

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
PING = b": \n\n"
"""A comment: clients skip it, and proxies see that the stream lives."""
DONE = b"data: [DONE]\n\n"

# Line ends in Unicode but not in this format: some clients split at them all the same.
_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def data(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dumps(body).translate(_LINE_ENDS).encode() + b"\n\n"
