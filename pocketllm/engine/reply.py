"""A reply as its reader sees it: tokens become text, and text and token ids are released together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.detokenizer import Detokenizer
from pocketllm.engine.stops import StopMatcher
from pocketllm.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class ReplyToken:
    """A token of the reply.

    Attributes:
        id: its id.
        logprob: how likely the model found it, where that was asked for.
        first: the character of the reply's text that it begins in.
        has_text: whether it has any.
    """

    id: int
    logprob: TokenLogprob | None
    first: int
    has_text: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain.

    Attributes:
        text: never splits a character.
        tokens: the tokens that begin in this text.
        stop_match: the stop string that ended the reply here, or None.
    """

    text: str
    tokens: tuple[ReplyToken, ...]
    stop_match: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens' ids."""
        return tuple(token.id for token in self.tokens)


class Reply:
    """Released text covers exactly the released token ids: a token is released once its first character is."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._decoded = 0  # characters that the detokenizer has given
        self._released = 0  # characters that the reader has
        self._waiting: deque[ReplyToken] = deque()

    def add(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """Take the next token of the reply."""
        has_text = bool(self._detokenizer.bytes_of(token_id))
        text, foreign = self._detokenizer.add(token_id)
        self._waiting.append(ReplyToken(token_id, logprob, self._decoded + foreign, has_text))
        self._decoded += len(text)
        certain, match = self._stops.add(text)
        return self._release(certain, match)

    def finish(self) -> Piece:
        """The rest, when the reply ends for another reason than a stop string. An incomplete character is dropped."""
        text = self._detokenizer.finish()
        self._decoded += len(text)
        certain, _ = self._stops.add(text)
        return self._release(certain + self._stops.flush(), None)

    def _release(self, text: str, match: str | None) -> Piece:
        self._released += len(text)
        tokens = []
        while self._waiting:
            token = self._waiting[0]
            if token.first > self._released or (token.first == self._released and token.has_text):
                break
            tokens.append(self._waiting.popleft())
        return Piece(text, tuple(tokens), match)
