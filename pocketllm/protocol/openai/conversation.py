"""The conversation of a chat request, as every route takes it that renders one."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.fields import Default, RequestObject
from pocketllm.protocol.openai.messages import Message

# Names that are not the template's variables but parameters on the way to it; `allow_special` guards the prompt.
_TAKEN_NAMES = frozenset(
    {"self", "tokenizer", "template", "messages", "tools", "add_generation_prompt", "allow_special"}
)


def _free_names(arguments: dict[str, Any] | None) -> dict[str, Any] | None:
    taken = sorted(_TAKEN_NAMES.intersection(arguments or ()))
    if taken:
        raise ValueError(f"an object without {taken[0]!r}, which is no variable of the template's own")
    return arguments


class ConversationFields(RequestObject):
    """Messages, and how they become a prompt."""

    messages: Annotated[
        list[Message],
        Field(fail_fast=True, min_length=1, description="The conversation, for the checkpoint's template."),
    ]
    add_generation_prompt: Annotated[
        bool | None,
        Field(
            description="Whether the prompt ends with the opening of an assistant turn; false renders the conversation "
            "as it stands."
        ),
        Default("true"),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        Field(
            description="Whether a final assistant message is the beginning of the reply rather than a finished turn; "
            "the reply then holds only what comes after it."
        ),
        Default("true, unless add_generation_prompt is false or the message calls tools"),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        AfterValidator(_free_names),
        Field(description="Further variables for the template; those that it does not read change nothing."),
        Default("none"),
    ] = None

    @model_validator(mode="after")
    def _has_a_message_to_continue(self) -> Self:
        final = self.messages[-1]
        if self.continue_final_message and (final.role != "assistant" or final.tool_calls):
            raise InvalidRequestError(
                '"continue_final_message" = true is not allowed here: the last message is not an assistant\'s text. '
                "End the conversation with the text to continue, or leave the field out.",
                param="continue_final_message",
            )
        return self

    @property
    def continues_final_message(self) -> bool:
        """Whether the reply goes on where the last message ends."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        final = self.messages[-1]
        return final.role == "assistant" and not final.tool_calls and self.add_generation_prompt is not False

    def rendering(self) -> dict[str, Any]:
        """How the messages become a prompt, as the engine's arguments."""
        return {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": self.continues_final_message,
            "template_variables": self.chat_template_kwargs,
        }

    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation as the template gets it."""
        return [message.for_template() for message in self.messages]
