"""Plain completions: the request's fields, and the reply whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from pocketllm.protocol.openai.not_served import NotServedCompletionFields
from pocketllm.protocol.openai.reply import Answer, ReplyHead, usage_body
from pocketllm.protocol.openai.sampling import GenerationFields, TokenId
from pocketllm.types import FinishReason, Prompt, Usage

ID_PREFIX = "cmpl-"


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    match value[:1]:
        case [int()]:
            return "token ids"
        case [list()]:
            return "lists of token ids"
    return "texts"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("texts")]
    | Annotated[list[TokenId], Field(fail_fast=True), Tag("token ids")]
    | Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
        Field(fail_fast=True),
        Tag("lists of token ids"),
    ],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]


class CompletionRequest(GenerationFields, NotServedCompletionFields):
    """The fields of ``POST /v1/completions``."""

    prompt: Annotated[
        Prompts,
        Field(description="A text, several texts, token ids, or several lists of them; special tokens are parsed."),
    ]
    add_special_tokens: Annotated[
        bool | None,
        Field(description="Whether a text gets the tokens that the tokenizer's metadata adds; so by default."),
    ] = None
    echo: Annotated[bool | None, Field(description="Begin each choice's text with its prompt.")] = None

    def prompts(self) -> list[Prompt]:
        """The prompts, one or several, in their order."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Plain completions about one head.

    Attributes:
        head: what every chunk repeats.
        echoes: for each choice the text to put before it; empty without ``echo``.
    """

    head: ReplyHead
    echoes: Sequence[str] = ()

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response without streaming."""
        choices = [
            _choice(index, self._echo(index) + output.text, output.finish_reason) for index, output in answer.choices
        ]
        return self.head.body("text_completion", choices, usage=usage_body(answer.usage), seed=answer.seed)

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk: the prompt, or None when it was not asked for."""
        return self.delta(index, self._echo(index)) if self.echoes else None

    def delta(self, index: int, text: str) -> dict[str, Any]:
        """More of a choice's text."""
        return self.head.body("text_completion", [_choice(index, text, None)])

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """A choice's last chunk."""
        return self.head.body("text_completion", [_choice(index, "", reason)])

    def usage(self, usage: Usage, seed: int | None) -> dict[str, Any]:
        """The chunk after the last choice's end, when the request asks for it."""
        return self.head.body("text_completion", [], usage=usage_body(usage), seed=seed)

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""


def _choice(index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
