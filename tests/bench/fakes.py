"""Contenders without a model or a process: what they say is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pocketllm.bench.contenders.base import Decoded, LogProbabilities, Setup

VOCABULARY = 8


class FakeRemote:
    """Answers the calls of a contender; replies are what `reply` makes of a prompt."""

    def __init__(self, reply: Callable[[Sequence[int]], list[int]], log: list[tuple[str, Any]]) -> None:
        self._reply = reply
        self._log = log
        self.closed = False

    def call(self, method: str, *arguments: Any) -> Any:
        self._log.append((method, arguments))
        return getattr(self, method)(*arguments)

    def facts(self) -> dict[str, str]:
        return {"made of": "nothing"}

    def prefill(self, prompt: Sequence[int]) -> float:
        return 0.5

    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> Decoded:
        replies = [self._reply(prompt)[:count] for prompt in prompts]
        return Decoded(replies, len(prompts) * (count - 1), 0.25)

    def log_probabilities(self, tokens: Sequence[int]) -> LogProbabilities:
        """Each token surely followed by itself plus one, with the next likeliest a nat behind."""
        rows = np.full((len(tokens), VOCABULARY), -30.0, dtype=np.float32)
        for place, token in enumerate(tokens):
            rows[place, (token + 1) % VOCABULARY] = np.log(1 / (1 + np.exp(-1.0)))
            rows[place, (token + 2) % VOCABULARY] = np.log(1 / (1 + np.exp(1.0)))
        return rows

    def measure(self) -> dict[str, float]:
        return {"read": 10.0, "float32 products": 20.0}

    def peak_memory_mib(self) -> float:
        return 12.0

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeRemote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FakeStart:
    """In place of `registry.start`: makes contenders, and remembers what they were asked."""

    def __init__(self) -> None:
        self.replies: dict[str, Callable[[Sequence[int]], list[int]]] = {}
        self.calls: dict[str, list[tuple[str, Any]]] = {}
        self.made: list[FakeRemote] = []

    def __call__(self, name: str, setup: Setup) -> FakeRemote:
        remote = FakeRemote(self.replies.get(name, ascending), self.calls.setdefault(name, []))
        self.made.append(remote)
        return remote


def ascending(prompt: Sequence[int]) -> list[int]:
    """The numbers that follow the prompt's last."""
    return [(prompt[-1] + 1 + step) % VOCABULARY for step in range(99)]
