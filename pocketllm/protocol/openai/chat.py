"""Chat completions: the request's fields, and the reply whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from pocketllm.protocol.openai.messages import Message
from pocketllm.protocol.openai.not_served import NotServedChatFields
from pocketllm.protocol.openai.reply import Answer, ReplyHead, usage_body
from pocketllm.protocol.openai.sampling import GenerationFields
from pocketllm.types import FinishReason, Usage

ID_PREFIX = "chatcmpl-"

# Names that are not the template's variables but parameters on the way to it; `allow_special` guards the prompt.
_TAKEN_NAMES = frozenset(
    {"self", "tokenizer", "template", "messages", "tools", "add_generation_prompt", "allow_special"}
)


def _free_names(arguments: dict[str, Any] | None) -> dict[str, Any] | None:
    taken = sorted(_TAKEN_NAMES.intersection(arguments or ()))
    if taken:
        raise ValueError(f"an object without {taken[0]!r}, which is no variable of the template's own")
    return arguments


class ChatRequest(GenerationFields, NotServedChatFields):
    """The fields of ``POST /v1/chat/completions``."""

    messages: Annotated[
        list[Message],
        Field(fail_fast=True, min_length=1, description="The conversation, for the checkpoint's template."),
    ]
    add_generation_prompt: Annotated[
        bool | None, Field(description="Whether the prompt ends with the opening of an assistant turn; so by default.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, AfterValidator(_free_names), Field(description="Further variables for the template.")
    ] = None

    def field_name(self, param: str | None) -> str | None:
        """See `GenerationFields.field_name`: the prompt of a chat is its messages."""
        return "messages" if param == "prompt" else super().field_name(param)

    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation as the template gets it."""
        return [message.for_template() for message in self.messages]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Chat completions about one head."""

    head: ReplyHead

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response without streaming."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": None,
                "finish_reason": output.finish_reason,
            }
            for index, output in answer.choices
        ]
        return self.head.body("chat.completion", choices, usage=usage_body(answer.usage), seed=answer.seed)

    def opening(self, index: int) -> dict[str, Any]:
        """A choice's first chunk."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str) -> dict[str, Any]:
        """More of a choice's text."""
        return self._chunk(index, {"content": text}, None)

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """A choice's last chunk."""
        return self._chunk(index, {}, reason)

    def usage(self, usage: Usage, seed: int | None) -> dict[str, Any]:
        """The chunk after the last choice's end, when the request asks for it."""
        return self.head.body("chat.completion.chunk", [], usage=usage_body(usage), seed=seed)

    def _chunk(self, index: int, delta: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.head.body("chat.completion.chunk", [choice])
