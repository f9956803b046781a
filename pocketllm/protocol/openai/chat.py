"""Chat completions: the request's fields, and the reply whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.fields import Default
from pocketllm.protocol.openai.answer import Answer
from pocketllm.protocol.openai.conversation import ConversationFields
from pocketllm.protocol.openai.logprobs import chat_logprobs
from pocketllm.protocol.openai.not_served import NotServedChatFields
from pocketllm.protocol.openai.reply import ReplyHead, closing_members, usage_members
from pocketllm.protocol.openai.sampling import GenerationFields
from pocketllm.types import MAX_LOGPROBS, CompletionOutput, FinishReason, TokenEvent

ID_PREFIX = "chatcmpl-"
CHUNK = "chat.completion.chunk"


class ChatRequest(ConversationFields, GenerationFields, NotServedChatFields):
    """The fields of ``POST /v1/chat/completions``."""

    logprobs: Annotated[
        bool | None,
        Field(description="Report the log probability of each token of the reply."),
        Default("false"),
    ] = None
    top_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="How many of the likeliest tokens to report beside each; above 0 only with logprobs true.",
        ),
        Default("0"),
    ] = None

    @model_validator(mode="after")
    def _ranks_only_what_is_reported(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                f'"top_logprobs" = {self.top_logprobs} is not allowed by itself: send "logprobs": true as well.',
                param="top_logprobs",
            )
        return self

    @property
    def reported_logprobs(self) -> int | None:
        """See `GenerationFields.reported_logprobs`."""
        return self.top_logprobs or 0 if self.logprobs else None

    def field_name(self, param: str | None) -> str | None:
        """See `GenerationFields.field_name`: the prompt of a chat is its messages."""
        return "messages" if param == "prompt" else super().field_name(param)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Chat completions about one head.

    Attributes:
        head: what every chunk repeats.
        prompt_token_ids: the prompt, where token ids are part of the reply; else None.
    """

    head: ReplyHead
    prompt_token_ids: Sequence[int] | None = None

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response without streaming."""
        choices = [self._choice(index, output) for index, output in answer.choices]
        members = usage_members(answer) | closing_members(answer)
        return self.head.body("chat.completion", choices, **self._prompt_ids(), **members)

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": chat_logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            **self._ids(output.token_ids),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A choice's first chunk; the first of all carries the prompt's ids."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta, None) | (self._prompt_ids() if index == 0 else {})]

    def delta(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """More of a choice."""
        if not (event.text or event.logprobs or (event.token_ids and self.prompt_token_ids is not None)):
            return []
        delta = {"content": event.text}
        return [self._chunk(index, delta, chat_logprobs(event.logprobs or None), **self._ids(event.token_ids))]

    def finish(self, index: int, reason: FinishReason, answer: Answer | None) -> dict[str, Any]:
        """A choice's last chunk, and with an answer the last that has choices."""
        closing = {} if answer is None else closing_members(answer)
        return self._chunk(index, {}, None, finish_reason=reason) | closing

    def usage(self, answer: Answer) -> dict[str, Any]:
        """The chunk after the last choice's end, when the request asks for it."""
        return self.head.body(CHUNK, [], **usage_members(answer), **closing_members(answer))

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, **members: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **members}
        return self.head.body(CHUNK, [choice])

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {} if self.prompt_token_ids is None else {"token_ids": list(token_ids)}

    def _prompt_ids(self) -> dict[str, Any]:
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": list(self.prompt_token_ids)}
