"""What the offline API's callers may give, in the forms that the engine takes."""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.template import ChatTemplate
from pocketllm.errors import InvalidRequestError, UnsupportedFeatureError
from pocketllm.types import Message, Prompt, SamplingParams

IdArray: TypeAlias = npt.NDArray[np.integer[Any]]
Prompts: TypeAlias = Prompt | IdArray | Sequence[Prompt | IdArray]
"""A text, token ids, or several of them; token ids may be an integer array, several of one length a matrix."""

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

_FORMS = "a text, token ids (whole numbers in a list or a NumPy array), or a list of texts or token ids"

# Fields of chat requests that nothing here acts on, with the values at which they ask for nothing.
_NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "tools": (None, [], ()),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True),
    "response_format": (None, {"type": "text"}),
    "reasoning": (None, {}),
}
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def prompt_list(prompts: object) -> list[str | list[int]]:
    """Texts and token ids, one for each prompt; a prompt alone is a list of one.

    Raises:
        TypeError: it is none of the forms of `Prompts`.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise TypeError(f"prompts is {_shown(prompts)}: give {_FORMS}")
    if len(prompts) and _is_id(prompts[0]):
        return [_ids(prompts, "prompts")]
    return [_prompt(item, f"prompts[{place}]") for place, item in enumerate(prompts)]


def _prompt(value: object, name: str) -> str | list[int]:
    if isinstance(value, str):
        return value
    if not _is_list(value):
        raise TypeError(f"{name} is {_shown(value)}: give a text or token ids; prompts are {_FORMS}")
    return _ids(value, name)


def token_id_list(values: object) -> list[int]:
    """Token ids from any list or array of whole numbers.

    Raises:
        TypeError: it is none.
    """
    if not _is_list(values):
        raise TypeError(f"token_ids is {_shown(values)}: give whole numbers in a list or a NumPy array")
    return _ids(values, "token_ids")


def _ids(values: Any, name: str) -> list[int]:
    for place, value in enumerate(values):
        if not _is_id(value):
            raise TypeError(f"{name}[{place}] is {_shown(value)}: token ids are whole numbers")
    return [int(value) for value in values]


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return reprlib.repr(value)


def params_for(prompts: int, given: object) -> list[SamplingParams]:
    """Sampling parameters for each prompt.

    Raises:
        TypeError: they are neither None, `SamplingParams` nor a list of those.
        ValueError: there is not one for each.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * prompts
    if not _is_list(given) or not all(isinstance(params, SamplingParams) for params in given):
        raise TypeError(
            f"sampling_params is {_shown(given)}: give SamplingParams(...) for all prompts, or a list with one for each"
        )
    if len(given) != prompts:
        raise ValueError(f"{len(given)} sampling params for {prompts} prompts: give one for all, or one for each")
    return list(given)


def request_ids(prompts: int, call_id: str | None) -> list[str | None]:
    """The id of each prompt's request: that of the call for one alone, with ``-0``, ``-1``, ... behind it for several.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty.
    """
    if call_id is None:
        return [None] * prompts
    if not isinstance(call_id, str):
        raise TypeError(f"request_id is {_shown(call_id)}: give a text")
    if not call_id:
        raise ValueError("request_id is empty: give a text of at least one character, or none at all")
    return [call_id] if prompts == 1 else [f"{call_id}-{index}" for index in range(prompts)]


def conversation(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages; what each of them has is checked when they are rendered.

    Raises:
        TypeError: they are no list.
        InvalidRequestError: there is none.
    """
    if not _is_list(messages):
        raise TypeError(
            f"messages is {_shown(messages)}: give a list of messages such as {{'role': 'user', 'content': 'Hi'}}"
        )
    if not len(messages):
        raise InvalidRequestError("messages is empty: give at least one", param="messages")
    return messages


def template_variables(template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a chat template, without those that ask for nothing.

    Raises:
        TypeError: one is a field of `SamplingParams`.
        UnsupportedFeatureError: nothing would read it.
    """
    variables = {}
    for name, value in given.items():
        if name in _SAMPLING_FIELDS:
            raise TypeError(f"{name!r} says how a reply is drawn: give it in SamplingParams({name}=...)")
        if name in _NOT_SERVED:
            if value not in _NOT_SERVED[name]:
                raise UnsupportedFeatureError(f"this engine does not act on {name!r} yet: leave it out")
            continue
        if not _mentions(template, name):
            raise UnsupportedFeatureError(
                f"this model's chat template does not read {name!r}, so it would change nothing: leave it out"
            )
        variables[name] = value
    return variables


def _mentions(template: ChatTemplate, name: str) -> bool:
    sources = (template.source, template.tool_use_source or "")
    return any(re.search(rf"\b{re.escape(name)}\b", source) for source in sources)
