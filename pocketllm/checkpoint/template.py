"""The checkpoint's own chat template: from messages to the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from pocketllm.checkpoint import template_sandbox
from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.special_tokens import (
    RenderedPrompt,
    SpecialTokens,
    replace_surrogates,
    unmark,
    unused_noncharacter,
)
from pocketllm.checkpoint.template_sandbox import (
    LimitExceededError,
    RefusedError,
    RenderLimits,
    TemplateEnvironment,
    ToolArguments,
)
from pocketllm.checkpoint.tokenizer import Tokenizer, optional_json_object
from pocketllm.errors import CheckpointError, InvalidRequestError, TemplateError

# What `ChatTemplate.render` gives to a template by arguments of its own.
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})

# What untrusted template code can raise besides Jinja2's own errors: it runs operators, methods and filters of
# Python's values, and compiling it can exhaust the parser.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the shape that templates expect, made anew: the caller's are not touched.

    - A field that is null is absent. Content that is null or absent is the empty string, since templates add it to
      strings; a turn that only calls tools stays a turn.
    - Content in parts becomes one string: the texts of its ``text`` parts, joined with nothing in between.
    - A tool call's ``arguments`` become `ToolArguments` where they are a JSON object, and stay text otherwise.

    Raises:
        InvalidRequestError: a message or part is of the wrong type; ``param`` is its path.
    """
    normalised = []
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{path} should be an object, not {_kind(message)}.", param=path)
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"{path}.role should be a string such as 'user', not {_kind(message.get('role'))}.",
                param=f"{path}.role",
            )
        fields = {key: value for key, value in message.items() if value is not None}
        fields["content"] = _content_text(message.get("content"), f"{path}.content")
        if isinstance(fields.get("tool_calls"), list | tuple):
            fields["tool_calls"] = [_normalise_tool_call(call) for call in fields["tool_calls"]]
        normalised.append(fields)
    return normalised


def _content_text(content: object, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{path} should be a string or a list of parts, not {_kind(content)}.", param=path)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise InvalidRequestError(
                f"{path}.{index} should be an object with a type, not {_kind(part)}.", param=f"{path}.{index}"
            )
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"{path}.{index}.type is {part.get('type')!r}; this model reads parts of type 'text' only.",
                param=f"{path}.{index}.type",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{path}.{index}.text should be a string, not {_kind(part.get('text'))}.", param=f"{path}.{index}.text"
            )
        texts.append(part["text"])
    return "".join(texts)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _normalise_tool_call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _normalise_tool_call(call["function"])}
    if "arguments" in call:
        return {**call, "arguments": _tool_arguments(call["arguments"])}
    return dict(call)


def _tool_arguments(arguments: object) -> object:
    if isinstance(arguments, Mapping):
        return ToolArguments(arguments, json.dumps(arguments, ensure_ascii=False))
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):  # what the model wrote need not be JSON, and goes back as it was
        return arguments
    return ToolArguments(parsed, arguments) if isinstance(parsed, dict) else arguments


class ChatTemplate:
    """A Jinja2 chat template, rendered in the sandbox of `pocketllm.checkpoint.template_sandbox`.

    It is compiled when it is first rendered, so that a broken template stops chats but not the model.

    Attributes:
        source: the template.
        tool_use_source: the template for conversations with tools, where the checkpoint has a separate one.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use_source: str | None = None,
        variables: Mapping[str, str] | None = None,
        special_tokens: SpecialTokens | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """Take a template.

        Args:
            source: the template.
            tool_use_source: another one to use when tools are offered.
            variables: ``bos_token``, ``eos_token`` and so on.
            special_tokens: the texts that must not turn into special tokens when a message contains them.
            limits: what a rendering may spend.
        """
        self.source = source
        self.tool_use_source = tool_use_source
        self._variables = dict(variables or {})
        self._special_tokens = special_tokens or SpecialTokens(())
        self._limits = limits or RenderLimits()
        self._compiled = cache(self._compile)

    @classmethod
    def for_tokenizer(cls, source: str, tokenizer: Tokenizer, *, tool_use_source: str | None = None) -> ChatTemplate:
        """A template that knows the tokens of `tokenizer`."""
        return cls(
            source,
            tool_use_source=tool_use_source,
            variables=tokenizer.template_variables,
            special_tokens=tokenizer.special_tokens,
        )

    def compile(self) -> None:
        """Compile now rather than at the first rendering. TemplateError when the template is not valid."""
        with _faults_as_template_errors(), template_sandbox.metering(self._limits):
            for source in filter(None, (self.source, self.tool_use_source)):
                self._compiled(source)

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > self._limits.source:
            raise LimitExceededError(f"the template is longer than {self._limits.source} characters")
        return _environment().from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        allow_special: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a conversation.

        Text of a special token inside a message, a tool or a variable stays ordinary text: it is told apart by
        rendering once more with such text marked. A template may look for such a token in an assistant's turn and
        take it for what it is (``</think>``, say); where that makes the two renderings differ, assistant turns are
        left unmarked. If they differ still, because the template cuts or measures text, the conversation is refused.
        Not told apart is text that becomes a special token only together with what the template writes beside it.

        Args:
            messages: the conversation, see `normalise_messages`.
            tools: the tools that are offered; an empty list is none.
            add_generation_prompt: whether to end with the beginning of the assistant's turn.
            allow_special: let special tokens in messages be special tokens.
            variables: further variables of the template, such as ``enable_thinking``. None of them may
                have one of the `RESERVED_VARIABLES` as its name.

        Raises:
            InvalidRequestError: a message is malformed, or `variables` has a reserved name.
            TemplateError: the template refused the conversation (the message is then the template's own), failed,
                or went beyond the sandbox or its limits.
        """
        reserved = sorted(RESERVED_VARIABLES.intersection(variables or {}))
        if reserved:
            raise InvalidRequestError(
                f"A chat template's variable cannot be called {reserved[0]!r}: the request has a field of its own for "
                "it.",
                param=f"chat_template_kwargs.{reserved[0]}",
            )
        inputs = {
            "documents": None,  # defined for every template, as in transformers
            **(variables or {}),
            "messages": normalise_messages(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.tool_use_source if tools and self.tool_use_source is not None else self.source
        with _faults_as_template_errors(), template_sandbox.metering(self._limits):
            template = self._compiled(source)
        now = datetime.now()
        text = self._run(template, inputs, now)
        if allow_special or not any(self._special_tokens.occurs_in(part) for part in _texts(inputs)):
            return RenderedPrompt(replace_surrogates(text))
        prompt = self._tell_apart(template, inputs, text, now)
        return RenderedPrompt(replace_surrogates(prompt.text), prompt.breaks)

    def _tell_apart(
        self, template: jinja2.Template, inputs: dict[str, Any], text: str, now: datetime
    ) -> RenderedPrompt:
        """`text`, with breaks in the special tokens' texts that came from `inputs`."""
        mark = unused_noncharacter([text, *_texts(inputs)])
        if mark is None:
            raise TemplateError("The conversation contains every noncharacter of Unicode; leave out U+FDD0 to U+FDEF.")
        messages = inputs["messages"]
        for spared in (None, "assistant"):
            marked = self._map_inputs(inputs, mark) | {
                "messages": [
                    message if message["role"] == spared else self._map_inputs(message, mark) for message in messages
                ]
            }
            try:
                prompt = unmark(self._run(template, marked, now), mark)
            except TemplateError:  # the template refuses the marks, as if they made it a different conversation
                continue
            if prompt.text == text:
                return prompt
        raise TemplateError(
            "A message contains the text of a special token of this model, and the chat template cuts or tests the "
            "text around it, so it cannot be kept apart from a real one. Leave that text out, or allow special tokens "
            "in content."
        )

    def _map_inputs(self, inputs: dict[str, Any], mark: str) -> dict[str, Any]:
        mapped: dict[str, Any] = _map_texts(inputs, lambda text: self._special_tokens.mark(text, mark))
        return mapped

    def _run(self, template: jinja2.Template, inputs: Mapping[str, Any], now: datetime) -> str:
        with _faults_as_template_errors(), template_sandbox.metering(self._limits, now):
            return template_sandbox.render(template, {**self._variables, **inputs})


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@contextmanager
def _faults_as_template_errors() -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        raise TemplateError(str(error)) from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"The chat template is not valid Jinja2: line {error.lineno}: {error.message}") from error
    except _TEMPLATE_FAULTS as error:
        raise TemplateError(f"The chat template could not be rendered: {error or type(error).__name__}") from error


def _texts(value: object) -> Iterator[str]:
    """Every string in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if isinstance(value, ToolArguments):
            yield value.text
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of `value` with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        mapped = {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
        return ToolArguments(mapped, change(value.text)) if isinstance(value, ToolArguments) else mapped
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value


def find_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a checkpoint carries, or None.

    A directory's ``chat_template.jinja`` comes before the ``chat_template`` of its ``tokenizer_config.json``, and
    named templates (``default``, ``tool_use``) may lie in ``additional_chat_templates`` or in the configuration. GGUF
    metadata has ``tokenizer.chat_template`` and named variants with the name appended.

    Raises:
        CheckpointError: there is a template, but in no form that is known.
    """
    templates = _gguf_templates(checkpoint.config) if checkpoint.naming == "gguf" else _hf_templates(checkpoint.path)
    source = templates.get("default")
    if source is None:
        return None
    return ChatTemplate.for_tokenizer(source, tokenizer, tool_use_source=templates.get("tool_use"))


def _hf_templates(directory: Path) -> dict[str, str]:
    declared = optional_json_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(declared, list):
        try:
            declared = {entry["name"]: entry["template"] for entry in declared}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: each entry of chat_template should have a name and a "
                f"template: {error!r}"
            ) from error
    templates = dict(declared) if isinstance(declared, dict) else {} if declared is None else {"default": declared}
    templates |= {file.stem: _read_text(file) for file in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = _read_text(file)
    return _checked(templates, str(directory / "tokenizer_config.json"))


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": source
        for key, source in metadata.items()
        if key == prefix or key.startswith(prefix + ".")
    }
    return _checked(templates, prefix)


def _checked(templates: dict[str, Any], place: str) -> dict[str, str]:
    for name, source in templates.items():
        if not isinstance(source, str):
            raise CheckpointError(f"{place}: the chat template {name!r} should be a string, not {_kind(source)}.")
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8: {error}") from error
