"""``docs/api.md``, written from the tables of request fields: ``python -m pocketllm.protocol.documentation``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from pocketllm.protocol.documentation_text import ERRORS, INTRODUCTION, REPLIES, ROUTES, STREAMS
from pocketllm.protocol.fields import Default, NotServed
from pocketllm.protocol.json_text import dumps
from pocketllm.protocol.openai.chat import ChatRequest
from pocketllm.protocol.openai.completions import CompletionRequest
from pocketllm.protocol.openai.conversation import ConversationFields
from pocketllm.protocol.openai.messages import Message, TextPart, ToolCall
from pocketllm.protocol.openai.sampling import GenerationFields, InertFields, StreamOptions
from pocketllm.protocol.openai.tokenization import (
    DetokenizeRequest,
    TokenizeContent,
    TokenizeMessages,
    TokenizePrompt,
)

Row = tuple[str, ...]


def api_page() -> str:
    """The whole page, in Markdown."""
    return "\n\n".join(_parts()) + "\n"


def _parts() -> Iterator[str]:
    yield INTRODUCTION
    yield "## Routes"
    yield _table(("route", "what it does"), [(f"`{route}`", text) for route, text in ROUTES.items()])
    yield "## Request fields"
    yield (
        "A field is accepted only when the server acts on it. An unknown field is a 400 that names the nearest known "
        "one; null is the same as leaving a field out; types are strict: `true` is no number and `5.0` no integer."
    )
    yield "### Chat and plain completions"
    yield _fields(GenerationFields, without=InertFields)
    yield "`stream_options`:"
    yield _fields(StreamOptions)
    yield "### Only `POST /v1/chat/completions`"
    yield _fields(ChatRequest, without=GenerationFields)
    for title, table in (("A message", Message), ("A part of a message", TextPart), ("A tool call", ToolCall)):
        yield f"{title}; further members reach the template as they are:"
        yield _fields(table)
    yield "### Only `POST /v1/completions`"
    yield _fields(CompletionRequest, without=GenerationFields, also=("max_tokens",))
    yield "### Inert"
    names = ", ".join(f"`{name}`" for name in InertFields.model_fields)
    yield f"These cannot change the text; they are accepted and not read: {names}."
    yield "### Known and not served"
    yield "Fields that clients know from elsewhere. Each passes only at null and at the values listed."
    yield _table(("field", "route", "passes at", "because"), _not_served())
    yield "### `POST /tokenize`, `/detokenize`, `/apply-template`"
    yield "`/apply-template` takes the body of a chat. `/tokenize` takes one of three bodies."
    yield "With `content`, the answer being llama-server's `{tokens}`:"
    yield _fields(TokenizeContent)
    yield "With `prompt`, the answer being vLLM's `{count, max_model_len, tokens, token_strs}`:"
    yield _fields(TokenizePrompt)
    yield "With `messages`, the answer being the same:"
    yield _fields(TokenizeMessages, without=ConversationFields)
    yield "and the conversation's own fields, as for a chat. `/detokenize`, the answer being `{content, prompt}`:"
    yield _fields(DetokenizeRequest)
    yield REPLIES
    yield STREAMS
    yield ERRORS


def _fields(table: type[BaseModel], *, without: type[BaseModel] | None = None, also: Iterable[str] = ()) -> str:
    """The served fields of a table, less those of another."""
    schema = table.model_json_schema()
    left_out = set(without.model_fields) - set(also) if without else set()
    rows = []
    for name, field in table.model_fields.items():
        if name in left_out or _rule(field.metadata, NotServed):
            continue
        default = _rule(field.metadata, Default)
        absent = "required" if field.is_required() else default.text if default else ""
        rows.append((f"`{name}`", _type(schema["properties"][name], schema), absent, field.description or ""))
    return _table(("field", "type", "when absent", ""), rows)


def _rule(metadata: Iterable[Any], kind: type[Any]) -> Any:
    return next((rule for rule in metadata if isinstance(rule, kind)), None)


def _not_served() -> Iterator[Row]:
    tables = {"chat": ChatRequest.model_fields, "completions": CompletionRequest.model_fields}
    names = dict.fromkeys(name for fields in tables.values() for name in fields)
    for name in names:
        rules = {route: _rule(fields[name].metadata, NotServed) for route, fields in tables.items() if name in fields}
        routes = [route for route, rule in rules.items() if rule]
        if routes:
            rule = rules[routes[0]]
            values = ", ".join(f"`{dumps(value)}`" for value in rule.neutral)
            yield (f"`{name}`", "both" if len(routes) == len(tables) else routes[0], values, rule.instead)


def _type(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return _type(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = (_type(member, root) for member in schema[union] if member.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'], root)}"
    return f"{schema.get('type', 'any')}{_bounds(schema)}"


def _bounds(schema: dict[str, Any]) -> str:
    if "maxLength" in schema:
        return f" of at most {schema['maxLength']} characters"
    least, most = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if most is None:
        start = "" if above is None else f" above {above:g}"
        return start if least is None else f" ≥ {least}"
    return f", above {above:g} to {most:g}" if least is None else f", {_number(least)} to {_number(most)}"


def _number(value: float) -> str:
    return "2^64 - 1" if value == 2**64 - 1 else f"{value:g}"


def _table(heads: Row, rows: Iterable[Row]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    print(api_page(), end="")
