"""What callers may give: every form of prompts, and what is said about everything else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.arguments import prompt_list
from pocketllm.errors import InvalidRequestError, UnsupportedFeatureError
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary, arithmetic

SHORT = SamplingParams(max_tokens=3)
IDS = st.lists(st.integers(0, 2**31), min_size=1, max_size=5)


@given(IDS, st.sampled_from([list, tuple, np.array, lambda ids: list(np.array(ids))]))
def test_one_prompt_of_token_ids(ids: list[int], form: Any) -> None:
    assert prompt_list(form(ids)) == [ids]
    assert prompt_list([form(ids)]) == [ids]
    assert all(type(token) is int for token in prompt_list(form(ids))[0])


@given(st.lists(st.text() | IDS, max_size=5))
def test_several_prompts(prompts: list[str | list[int]]) -> None:
    assert prompt_list(prompts) == prompts
    assert prompt_list(tuple(np.array(p) if isinstance(p, list) else p for p in prompts)) == prompts


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("text", ["text"]),
        ([], []),
        (np.array([], dtype=int), []),
        ([[]], [[]]),
        (range(3), [[0, 1, 2]]),
        (np.array([[1, 2], [3, 4]], dtype=np.uint16), [[1, 2], [3, 4]]),
        (np.array(["a", "b"]), ["a", "b"]),
    ],
)
def test_further_forms(given_: object, expected: list[object]) -> None:
    assert prompt_list(given_) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (None, "prompts is None: give a text, token ids"),
        (5, "prompts is 5: give"),
        (b"text", "prompts is b'text': give"),
        ({"a": 1}, "prompts is {'a': 1}: give"),
        ({"a"}, "prompts is {'a'}: give"),
        (iter("a"), "prompts is <str_"),
        (np.array(5), r"prompts is an array of int64 with shape \(\): give"),
        ([1, 2.5], r"prompts\[1\] is 2.5: token ids are whole numbers"),
        ([1, "a"], r"prompts\[1\] is 'a': token ids are whole numbers"),
        (["a", 1], r"prompts\[1\] is 1: give a text or token ids"),
        ([True], r"prompts\[0\] is True: give"),
        ([1, False], r"prompts\[1\] is False: token ids"),
        ([[1, "a"]], r"prompts\[0\]\[1\] is 'a': token ids"),
        (np.array([1.0]), r"prompts\[0\] is .*1.0.*: give"),
        (np.zeros((2, 2, 2), dtype=int), r"prompts\[0\]\[0\] is an array of int64 with shape \(2,\): token ids"),
        (["a", None], r"prompts\[1\] is None: give"),
    ],
)
def test_other_forms_are_refused(make_llm, given_: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_llm(lambda context: 65).generate(given_)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"temperature": 0}, TypeError, r"sampling_params is {'temperature': 0}: give SamplingParams"),
        ([SHORT, None], TypeError, "sampling_params is"),
        ([SHORT], ValueError, "1 sampling params for 2 prompts: give one for all, or one for each"),
    ],
)
def test_params_are_checked(make_llm, params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_llm(lambda context: 65).generate(["a", "b"], params)


@pytest.mark.parametrize(("request_id", "error"), [(5, TypeError), ("", ValueError)])
def test_request_ids_are_checked(make_llm, request_id: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="request_id is"):
        make_llm(lambda context: 65).generate("a", request_id=request_id)


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("Hi", TypeError, "messages is 'Hi': give a list of messages such as {'role': 'user', 'content': 'Hi'}"),
        ({"role": "user", "content": "Hi"}, TypeError, "messages is {"),
        ([], InvalidRequestError, "messages is empty: give at least one"),
        (["Hi"], InvalidRequestError, "messages.0 should be an object"),
    ],
)
@pytest.mark.parametrize("method", ["chat", "chat_stream", "apply_template"])
def test_messages_are_checked(make_llm, method: str, messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(make_llm(lambda context: 65), method)(messages)


MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}]


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ({"temperature": 0}, TypeError, r"'temperature' says how a reply is drawn: give it in SamplingParams"),
        ({"tools": [{"type": "function"}]}, UnsupportedFeatureError, "does not act on 'tools' yet"),
        ({"tool_choice": "required"}, UnsupportedFeatureError, "'tool_choice'"),
        ({"response_format": {"type": "json_object"}}, UnsupportedFeatureError, "'response_format'"),
        ({"enable_thinking": False}, UnsupportedFeatureError, "template does not read 'enable_thinking'"),
        ({"rol": 1}, UnsupportedFeatureError, "template does not read 'rol'"),
    ],
)
@pytest.mark.parametrize("method", ["chat", "chat_stream", "apply_template"])
def test_nothing_is_ignored(make_llm, method: str, variables: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(make_llm(lambda context: 65), method)(MESSAGES, **variables)


def test_what_asks_for_nothing_is_accepted(make_llm) -> None:
    neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    llm = make_llm(lambda context: 65)
    assert llm.apply_template(MESSAGES, reasoning=None, **neutral) == llm.apply_template(MESSAGES)


def test_what_the_caller_owns_is_not_changed(make_llm) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompts, params = [[1, 2], [3]], [SHORT, SamplingParams(max_tokens=2, stop=["x"])]  # type: ignore[arg-type]
    before = copy.deepcopy((messages, prompts, params))
    llm = make_llm(arithmetic(Vocabulary()))
    llm.chat(messages, SHORT)
    list(llm.chat_stream(messages, SHORT))
    llm.generate(prompts, params)
    llm.score(prompts)
    assert (messages, prompts, params) == before
