"""One choice of a request on its way through the engine."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from pocketllm.engine.reply import Reply
from pocketllm.engine.request import RequestHandle
from pocketllm.engine.sampler import ResolvedSampling
from pocketllm.errors import EngineError
from pocketllm.types import FinishReason, TokenEvent


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
        budget: most tokens of the reply.
        end_ids: ids that end the reply.
        reply: its text.
        computed: tokens whose keys and values are in the cache.
        blocks: its KV blocks, in order.
        passed_over: prefill chunks that went to others while it waited.
        cancelled: its reader wants no more.
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
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    passed_over: int = 0
    cancelled: bool = False
    counts: Counter[int] = field(default_factory=Counter)
    _finished: bool = False

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
    def finished(self) -> bool:
        """Whether its last event is out."""
        return self._finished

    def accept(self, token_id: int) -> None:
        """Take a drawn token: tell the reader what became certain, and finish where the reply ends."""
        self.tokens.append(token_id)
        self.counts[token_id] += 1
        if token_id in self.end_ids:
            self.finish("stop")
            return
        piece = self.reply.add(token_id)
        if piece.stop_match is not None:
            self._last_event(piece.text, piece.token_ids, "stop", piece.stop_match)
        elif self.generated >= self.budget:
            rest = self.reply.finish()
            self._last_event(piece.text + rest.text, piece.token_ids + rest.token_ids, "length", None)
        elif piece.text or piece.token_ids:
            event = TokenEvent(self.handle.request_id, self.prompt_index, self.index, piece.text, piece.token_ids)
            self.handle.put(event)

    def finish(self, reason: FinishReason) -> None:
        """End the reply here; text that was held back is given out."""
        rest = self.reply.finish()
        self._last_event(rest.text, rest.token_ids, reason, None)

    def fail(self, error: EngineError) -> None:
        """End the whole request with an error."""
        self._finished = True
        self.handle.put(error)

    def _last_event(self, text: str, token_ids: tuple[int, ...], reason: FinishReason, match: str | None) -> None:
        self._finished = True
        metadata = {"stop_match": match, "completion_tokens": self.generated, "seed": self.handle.seed}
        event = TokenEvent(
            self.handle.request_id, self.prompt_index, self.index, text, token_ids, reason, metadata=metadata
        )
        self.handle.put(event)
