"""A finished generation, as replies are worded from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.types import CompletionOutput, RequestOutput, Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one prompt or several.

    Attributes:
        requests: one for each prompt.
        n: choices of each prompt.
        choices: every choice that arrived, with its index: prompt times n plus the prompt's choice.
    """

    requests: Sequence[RequestOutput]
    n: int
    choices: Sequence[tuple[int, CompletionOutput]]

    @property
    def usage(self) -> Usage:
        """Tokens of all prompts together."""
        usages = [request.usage for request in self.requests]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        )

    @property
    def seed(self) -> int | None:
        """The seed that drew the choices, or None where each prompt drew its own."""
        seeds = {request.seed for request in self.requests}
        return seeds.pop() if len(seeds) == 1 else None

    @property
    def prefill_seconds(self) -> list[list[float]]:
        """For each prompt that a choice arrived of, how long each of its choices took up to the first token."""
        by_prompt: dict[int, list[float]] = {}
        for index, choice in self.choices:
            if choice.timing is not None:
                by_prompt.setdefault(index // self.n, []).append(choice.timing.prefill)
        return list(by_prompt.values())

    def prompt(self, index: int) -> RequestOutput:
        """The prompt's request behind a choice."""
        return self.requests[index // self.n]
