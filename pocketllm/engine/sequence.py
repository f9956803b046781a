"""One choice of a request on its way through the engine."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.reply import Reply, ReplyToken
from pocketllm.engine.request import RequestHandle
from pocketllm.engine.sampler import ResolvedSampling
from pocketllm.engine.states import SequenceStates
from pocketllm.types import FinishReason, Timing, TokenEvent, TokenLogprob

SEED_BITS = 53
"""Of seeds that nobody gave: they stay exact in JSON readers that keep numbers as doubles."""


def own_seed(prompt_token_ids: Iterable[int], salt: str | None) -> int:
    """The seed of a request that brings none: drawn, or derived from its prompt where there is a salt."""
    if salt is None:
        return secrets.randbits(SEED_BITS)
    key = hashlib.blake2b(salt.encode(errors="surrogateescape"), digest_size=64).digest()
    prompt = np.fromiter(prompt_token_ids, dtype="<i4").tobytes()
    derived = hashlib.blake2b(prompt, key=key, digest_size=8).digest()
    return int.from_bytes(derived, "little") >> (64 - SEED_BITS)


def distinct(token_ids: Iterable[int]) -> npt.NDArray[np.int32]:
    """The ids that occur, each once, in order."""
    return np.unique(np.fromiter(token_ids, dtype=np.int32))


def choice_seed(seed: int, index: int) -> int:
    """The seed that choice `index` of a request samples with: 64 bits of a hash of both."""
    material = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A choice: its tokens, how far they are computed, and what its reader has been told.

    Attributes:
        handle: the request it belongs to.
        index: which choice.
        prompt_index: which prompt of the caller's.
        arrival: order of submission.
        tokens: prompt and reply.
        prompt_length: how many of `tokens` are the prompt.
        sampling: how its tokens are drawn.
        seed: what they are drawn with.
        budget: most tokens of the reply; 0 computes the prompt and draws nothing.
        end_ids: ids that end the reply.
        reply: its text.
        top_logprobs: how many likeliest tokens are reported beside each of the reply; None reports nothing.
        prompt_logprobs: entries of the prompt's tokens so far, where they are asked for, else None.
        shares_prefix: whether it takes part in the prefix cache.
        computed: tokens whose keys and values are in the cache.
        blocks: its KV blocks, in order.
        shared: how many of them, from the first on, others can find.
        block_keys: the keys of its first blocks, as far as they were needed.
        states: its slots of recurrent states.
        passed_over: prefill chunks that went to others while it waited.
        counts: how often the reply has each token.
        seen: the `distinct` tokens of prompt and reply; None where no repetition penalty asks for them.
    """

    handle: RequestHandle
    index: int
    prompt_index: int
    arrival: int
    tokens: list[int]
    prompt_length: int
    sampling: ResolvedSampling
    seed: int
    budget: int
    end_ids: frozenset[int]
    reply: Reply
    top_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    shares_prefix: bool = True
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    states: SequenceStates = field(default_factory=SequenceStates)
    passed_over: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    seen: npt.NDArray[np.int32] | None = None
    _finished: bool = False
    _news: list[TokenEvent] = field(default_factory=list)
    _started_at: float | None = None
    _first_token_at: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next can be drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens of the reply so far, an ending one included."""
        return len(self.tokens) - self.prompt_length

    @property
    def most_tokens(self) -> int:
        """The most tokens that it can come to."""
        return self.prompt_length + self.budget

    @property
    def most_cached(self) -> int:
        """How many tokens, from the first on, need not be computed if they are found in the cache.

        The next token's logits are needed, and those of every token of the prompt that is yet to be scored.
        """
        scored = len(self.tokens) if self.prompt_logprobs is None else len(self.prompt_logprobs)
        return min(scored, len(self.tokens)) - 1

    @property
    def finished(self) -> bool:
        """Whether its last event is out."""
        return self._finished

    def start(self) -> None:
        """Its first step begins."""
        if self._started_at is None:
            self._started_at = time.monotonic()

    def add_prompt_logprob(self, entry: TokenLogprob) -> None:
        """The entry of the prompt's next token, where they are asked for."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.append(entry)

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Take a drawn token: tell the reader what became certain, and finish where the reply ends."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self.tokens.append(token_id)
        self.counts[token_id] += 1
        self._see(token_id)
        if token_id in self.end_ids:
            self.finish("stop")
            return
        piece = self.reply.add(token_id, logprob)
        if piece.stop_match is not None:
            self._tell(piece.text, piece.tokens, "stop", piece.stop_match)
        elif self.generated >= self.budget:
            rest = self.reply.finish()
            self._tell(piece.text + rest.text, piece.tokens + rest.tokens, "length")
        elif piece.text or piece.tokens:
            self._tell(piece.text, piece.tokens)

    def _see(self, token_id: int) -> None:
        if self.seen is None:
            return
        place = int(np.searchsorted(self.seen, token_id))
        if place == len(self.seen) or self.seen[place] != token_id:
            self.seen = np.concatenate([self.seen[:place], [token_id], self.seen[place:]], dtype=np.int32)

    def finish(self, reason: FinishReason) -> None:
        """End the reply here; text that was held back is given out."""
        rest = self.reply.finish()
        self._tell(rest.text, rest.tokens, reason)

    def abort(self) -> None:
        """End it without a last event: its request has failed, and the reader is told so once."""
        self._finished = True

    def take_news(self) -> list[TokenEvent]:
        """The events since this was last asked, for the reader."""
        news, self._news = self._news, []
        return news

    def _tell(
        self, text: str, tokens: tuple[ReplyToken, ...], reason: FinishReason | None = None, match: str | None = None
    ) -> None:
        metadata: dict[str, Any] = {}
        if self.prompt_logprobs is not None:
            metadata["prompt_logprobs"] = tuple(self.prompt_logprobs)
            self.prompt_logprobs = None
        if reason is not None:
            self._finished = True
            metadata |= self._ending(match)
        logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        self._news.append(
            TokenEvent(
                request_id=self.handle.request_id,
                prompt_index=self.prompt_index,
                index=self.index,
                text=text,
                token_ids=tuple(token.id for token in tokens),
                logprobs=None if self.top_logprobs is None else logprobs,
                finish_reason=reason,
                metadata=metadata,
            )
        )

    def _ending(self, match: str | None) -> dict[str, Any]:
        now = time.monotonic()
        started = self._started_at or now
        first = self._first_token_at or now
        executed = np.array(self.tokens[self.prompt_length :], dtype="<i4").tobytes()
        return {
            "stop_match": match,
            "completion_tokens": self.generated,
            "seed": self.handle.seed,
            "token_sha": hashlib.sha256(executed).hexdigest(),
            "timing": Timing(started - self.handle.submitted_at, first - started, now - first),
        }
