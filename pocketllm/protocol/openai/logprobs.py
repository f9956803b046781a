"""Log probabilities as chat and plain completions word them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.types import TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; it is the number that OpenAI uses."""


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """A chat choice's ``logprobs``; None when they were not asked for."""
    if entries is None:
        return None
    content = [_chat_token(entry) | {"top_logprobs": [_chat_token(other) for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _chat_token(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": entry.token.decode("utf-8", "replace"),
        "logprob": finite(entry.logprob),
        "bytes": list(entry.token),
    }


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where it begins.

    Attributes:
        token: its bytes.
        offset: characters of the choice's text before it.
        entry: how likely it was, or None for the first token of a prompt, which nothing precedes.
    """

    token: bytes
    offset: int
    entry: TokenLogprob | None


def completion_logprobs(tokens: Iterable[PlacedToken]) -> dict[str, Any]:
    """A plain completion's ``logprobs``: four lists of the same length."""
    placed = list(tokens)
    return {
        "tokens": [token_name(item.token) for item in placed],
        "token_logprobs": [None if item.entry is None else finite(item.entry.logprob) for item in placed],
        "top_logprobs": [None if item.entry is None else _likeliest(item.entry) for item in placed],
        "text_offset": [item.offset for item in placed],
    }


def token_name(token: bytes) -> str:
    r"""A token's text, or ``bytes:\xe2\x80`` for bytes that are no text by themselves."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _likeliest(entry: TokenLogprob) -> dict[str, float]:
    """Log probabilities by name: the likeliest tokens, and the token itself where it is not one of them.

    Tokens of the same bytes would share a name: all but the likeliest are called ``token_id:N``.
    """
    by_name: dict[str, float] = {}
    listed = {other.token_id for other in entry.top}
    for item in (*entry.top, *(() if entry.token_id in listed else (entry,))):
        name = token_name(item.token)
        by_name[f"token_id:{item.token_id}" if name in by_name else name] = finite(item.logprob)
    return by_name


def finite(logprob: float) -> float:
    """`logprob` as a number that JSON has."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class Placing:
    """Finds where each token of a growing reply begins; the text is what the tokens' bytes decode to."""

    def __init__(self, start: int, control_ids: Collection[int]) -> None:
        """Begin.

        Args:
            start: characters before the reply.
            control_ids: tokens that add nothing to the text.
        """
        self._characters = start
        self._control_ids = control_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, entries: Iterable[TokenLogprob]) -> list[PlacedToken]:
        """The next tokens with their places."""
        placed = []
        for entry in entries:
            placed.append(PlacedToken(entry.token, self._characters, entry))
            if entry.token_id not in self._control_ids:
                self._characters += len(self._decoder.decode(entry.token))
        return placed
