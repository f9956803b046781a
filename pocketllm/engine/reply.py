"""A reply as its reader sees it: tokens become text, and text and token ids are released together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.detokenizer import Detokenizer
from pocketllm.engine.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain.

    Attributes:
        text: never splits a character.
        token_ids: the tokens that begin in this text.
        stop_match: the stop string that ended the reply here, or None.
    """

    text: str
    token_ids: tuple[int, ...]
    stop_match: str | None = None


class Reply:
    """Released text covers exactly the released token ids: a token is released once its first character is."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._decoded = 0  # characters that the detokenizer has given
        self._released = 0  # characters that the reader has
        self._waiting: deque[tuple[int, int, bool]] = deque()  # token id, its first character, whether it has text

    def add(self, token_id: int) -> Piece:
        """Take the next token of the reply."""
        self._waiting.append((token_id, self._decoded, bool(self._detokenizer.bytes_of(token_id))))
        text = self._detokenizer.add(token_id)
        self._decoded += len(text)
        certain, match = self._stops.add(text)
        return self._release(certain, match)

    def finish(self) -> Piece:
        """The rest, when the reply ends for another reason than a stop string. An incomplete character is dropped."""
        return self._release(self._stops.flush(), None)

    def _release(self, text: str, match: str | None) -> Piece:
        self._released += len(text)
        tokens = []
        while self._waiting:
            token_id, first, has_text = self._waiting[0]
            if first > self._released or (first == self._released and has_text):
                break
            tokens.append(token_id)
            self._waiting.popleft()
        return Piece(text, tuple(tokens), match)
