"""From a request body to a checked table of fields, or to an error that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.fields import NOT_SERVED, UNKNOWN_FIELD, RequestObject
from pocketllm.protocol.json_text import dumps

Fields = TypeVar("Fields", bound=RequestObject)

SHOWN_CHARACTERS = 80

# What is allowed, by pydantic's type of error; other types, and the tables' own checks, word it themselves.
_WORDINGS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "a number of at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_too_long": "a string of at most {max_length} characters",
    "string_type": "a string",
    "too_long": "at most {max_length} entries",
    "too_short": "{min_length} or more entries",
}


def validated(table: type[Fields], body: dict[str, Any]) -> Fields:
    """`body` as the fields of `table`.

    Raises:
        InvalidRequestError: naming the first field at fault by its path, what was sent and what is allowed. A table's
            own rules about several fields raise it themselves.
    """
    try:
        return table.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        raise cause if isinstance(cause, InvalidRequestError) else _explained(table, body, first) from None


def _explained(table: type[RequestObject], body: dict[str, Any], error: ErrorDetails) -> InvalidRequestError:
    path = _path(body, error["loc"])
    context = error.get("ctx", {})
    if error["type"] == UNKNOWN_FIELD:
        param = ".".join((*path, context["field"]))
        nearest = context["nearest"]
        hint = f': did you mean "{nearest}"?' if nearest else "."
        return InvalidRequestError(f'"{param}" is not a field that this server knows{hint}', param=param)
    param = ".".join(path)
    if error["type"] == "missing":
        return InvalidRequestError(f'"{param}" is required.', param=param)
    sent = f'"{param}" = {_shown(error["input"])}'
    if error["type"] == NOT_SERVED:
        neutral = "".join(f" or send {dumps(value)}" for value in context["neutral"])
        message = f"{sent} is not supported by this server: {context['instead']}. Leave it out{neutral}."
        return InvalidRequestError(message, param=param)
    field = table.model_fields.get(param)
    allowed = _number_range(field) if field else None
    return InvalidRequestError(f"{sent} is not allowed: give {allowed or _allowed(error)}.", param=param)


def _path(body: Any, location: Sequence[int | str]) -> list[str]:
    """The part of pydantic's `location` that exists in the body: tags of unions and of keys are not in it."""
    path: list[str] = []
    here = body
    for index, step in enumerate(location):
        is_missing_member = index == len(location) - 1 and step != "[key]"
        if isinstance(here, dict) and (step in here or is_missing_member):
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int):
            here = here[step]
        else:
            continue
        path.append(str(step)[:64])
    return path


def _number_range(field: FieldInfo) -> str | None:
    """The numbers that a field takes, or None when it takes no bounded number."""
    bounds = [
        (word, getattr(rule, bound))
        for rule in field.metadata
        for kind, bound, word in (
            (annotated_types.Gt, "gt", "above"),
            (annotated_types.Ge, "ge", "from"),
            (annotated_types.Le, "le", "to"),
        )
        if isinstance(rule, kind)
    ]
    if not bounds:
        return None
    kind = "a whole number" if field.annotation == int | None else "a number"
    return " ".join([kind, *(f"{word} {value}" for word, value in bounds)])


def _allowed(error: ErrorDetails) -> str:
    wording = _WORDINGS.get(error["type"])
    return wording.format(**error.get("ctx", {})) if wording else error["msg"].removeprefix("Value error, ")


def _shown(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    if isinstance(value, list) and value:
        return f"a list of {len(value)}"
    if isinstance(value, dict) and value:
        return f"an object of {len(value)}"
    if isinstance(value, str):
        value = value[:SHOWN_CHARACTERS]
    text = str(value) if isinstance(value, float) else dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS + 2 else text[:SHOWN_CHARACTERS] + "…"
