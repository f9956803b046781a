"""What the replies of chat and plain completions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.types import CompletionOutput, Usage


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every chunk of a reply repeats.

    Attributes:
        id: of the response.
        created: Unix time in seconds.
        model: the served model's id.
        system_fingerprint: what computes the reply: the same fingerprint, request and seed give the same text.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str

    def body(self, kind: str, choices: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        """A response object, or a chunk, of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **members,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation, of one prompt or several.

    Attributes:
        choices: every choice that arrived with its index: prompt times n plus the prompt's choice.
        usage: tokens of all prompts together.
        seed: the seed that drew the choices, or None where each prompt drew its own.
    """

    choices: Sequence[tuple[int, CompletionOutput]]
    usage: Usage
    seed: int | None


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
