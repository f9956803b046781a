"""Chat messages: checked here, then handed whole to the checkpoint's template, which brings them into its shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pocketllm.protocol.fields import OpenObject

Inert = Annotated[Any, Field(exclude=True, description="Inert.")]
"""A member that says nothing about the text, so that it does not reach the template."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(OpenObject):
    """A piece of a message's text; parts of other types are refused."""

    type: Annotated[Literal["text"], Field(description="Text is the only kind of part that is served.")]
    text: Annotated[str, Field(description="Parts are joined as they are.")]
    cache_control: Inert = None


class CalledFunction(OpenObject):
    """The function of an earlier tool call."""

    name: Annotated[str, Field(description="Which function was called.")]
    arguments: Annotated[
        str | dict[str, Any],
        Field(union_mode="left_to_right", description="JSON text, or the object itself."),
    ]


class ToolCall(OpenObject):
    """A tool call of an earlier assistant turn."""

    id: Annotated[str | None, Field(description="By which the tool's answer names the call.")] = None
    type: Annotated[Literal["function"], Field(description="Calls are of functions.")] = "function"
    function: Annotated[CalledFunction, Field(description="What was called.")]


def _content_shape(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("parts")],
    Discriminator(
        _content_shape, custom_error_type="content_shape", custom_error_message="a string or a list of text parts"
    ),
]


class Message(OpenObject):
    """One turn; members that are not listed reach the template as they are."""

    role: Annotated[Role, Field(description="developer is the same as system.")]
    content: Annotated[Content | None, Field(description="A string, a list of text parts, or null.")] = None
    name: Annotated[str | None, Field(description="Who speaks, for templates that show it.")] = None
    tool_call_id: Annotated[str | None, Field(description="Of a tool turn: the call that it answers.")] = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(fail_fast=True)] | None,
        Field(description="Of an assistant turn: what it called."),
    ] = None
    cache_control: Inert = None

    def for_template(self) -> dict[str, Any]:
        """The turn as it was sent, less what is inert, under a role that templates know."""
        turn = self.model_dump(exclude_unset=True)
        if self.role == "developer":
            turn["role"] = "system"
        return turn
