"""What the replies of chat and plain completions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pocketllm.protocol.openai.answer import Answer
from pocketllm.protocol.openai.timings import proof, timings


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


def usage_members(answer: Answer) -> dict[str, Any]:
    """OpenAI's ``usage`` and, beside it, the seed."""
    usage = answer.usage
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "seed": answer.seed,
    }


def closing_members(answer: Answer) -> dict[str, Any]:
    """What a reply says of itself at its end."""
    return {"timings": timings(answer), "pocketllm": proof(answer)}
