from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.fields import NotServed, RequestObject
from pocketllm.protocol.openai.chat import ChatRequest
from pocketllm.protocol.openai.completions import CompletionRequest
from pocketllm.protocol.openai.sampling import GenerationFields
from pocketllm.protocol.validation import validated
from pocketllm.types import SamplingParams

LEAST: dict[type[RequestObject], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"prompt": "hi"},
}
TABLES = pytest.mark.parametrize("table", LEAST, ids=lambda table: table.__name__)
NUMBERS = [
    name for name, field in GenerationFields.model_fields.items() if field.annotation in (int | None, float | None)
]
NAMES = sorted({name for table in LEAST for name in table.model_fields})

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["text", "user", "type", "role", "content", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "7", "x", "function"]), inner, max_size=3)
    ),
    max_leaves=10,
)


def refused(table: type[RequestObject], **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validated(table, LEAST[table] | fields)
    return caught.value


@TABLES
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), JSON, max_size=5))
def test_any_json_is_accepted_or_refused_by_name(table: type[RequestObject], body: dict[str, Any]) -> None:
    try:
        fields = validated(table, LEAST[table] | body)
    except InvalidRequestError as error:
        refusal = error
    else:
        assert isinstance(fields, ChatRequest | CompletionRequest)
        assert isinstance(fields.sampling_params(), SamplingParams)
        return
    assert refusal.param is not None
    assert any(refusal.param == name or refusal.param.startswith(f"{name}.") for name in body)
    assert len(str(refusal).encode()) < 1000


@TABLES
@pytest.mark.parametrize("value", [True, "1", [1], {"a": 1}, math.nan, math.inf, 2**70, -(2**70), -1e300], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_wrong_kind_or_size_name_their_field(table: type[RequestObject], name: str, value: Any) -> None:
    unbounded = {"max_tokens", "max_completion_tokens", "min_tokens", "top_k", "timeout"}
    if value == 2**70 and name in unbounded:
        validated(table, LEAST[table] | {name: value})
        return
    error = refused(table, **{name: value})
    assert error.param == name
    assert name in str(error)
    assert "give a" in str(error)


@TABLES
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "n"])
@pytest.mark.parametrize("value", [5.5, 5.0])
def test_whole_numbers_are_asked_for(table: type[RequestObject], name: str, value: float) -> None:
    error = refused(table, **{name: value})
    assert error.param == name
    assert "a whole number" in str(error)


@given(
    st.sampled_from(sorted(set(NUMBERS) - {"timeout", "max_completion_tokens"})),
    st.integers(-(2**65), 2**65)
    | st.floats(-200, 200)
    | st.sampled_from([0, -1, 1, 2, 10, 128, 129, 2**64 - 1, 2**64, -2, 0.0, 1.0, 2.0, 10.0]),
)
def test_ranges_are_those_of_sampling_params(name: str, value: float) -> None:
    def accepts(check: Any) -> bool:
        try:
            check()
        except (ValueError, TypeError):
            return False
        return True

    assert accepts(lambda: validated(CompletionRequest, {"prompt": "x", name: value})) == accepts(
        lambda: SamplingParams(**{name: value})
    )


@TABLES
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a"] * 129}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["a", "b" * 1025]}, "stop.1"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids.1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\r\nb"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"timeout": 0}, "timeout"),
        ({"model": 5}, "model"),
        ({"user": ["x"]}, "user"),
        ({"metadata": "x"}, "metadata"),
    ],
    ids=str,
)
def test_wrong_values_name_their_path(table: type[RequestObject], fields: dict[str, Any], param: str) -> None:
    error = refused(table, **fields)
    assert error.param == param
    assert f'"{param}"' in str(error)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "wizard", "content": "hi"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages.0.content"),
        ([{"role": "user", "content": ["hi"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "tool_calls": {}}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function"),
    ],
)
def test_wrong_messages_name_their_path(messages: Any, param: str) -> None:
    assert refused(ChatRequest, messages=messages).param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([], "prompt"),
        ([[]], "prompt.0"),
        (["a", 1], "prompt.1"),
        ([1, "a"], "prompt.1"),
        ([1, -1], "prompt.1"),
        ([True], "prompt.0"),
        ([[1], [2.5]], "prompt.1.0"),
        ([[1], 2], "prompt.1"),
        ([None], "prompt.0"),
    ],
)
def test_wrong_prompts_name_their_path(prompt: Any, param: str) -> None:
    assert refused(CompletionRequest, prompt=prompt).param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts_are_one_or_several(prompt: Any, prompts: list[Any]) -> None:
    assert validated(CompletionRequest, {"prompt": prompt}).prompts() == prompts


@TABLES
def test_null_is_absent(table: type[RequestObject]) -> None:
    optional = {name: None for name in table.model_fields if name not in LEAST[table]}
    assert validated(table, LEAST[table] | optional).sampling_params() == SamplingParams()  # type: ignore[attr-defined]


@TABLES
def test_every_field_is_described(table: type[RequestObject]) -> None:
    schema = table.model_json_schema()
    assert all("description" in member for member in schema["properties"].values())
    json.dumps(schema, allow_nan=False)


@TABLES
def test_fields_that_are_not_served_pass_at_their_neutral_values_only(table: type[RequestObject]) -> None:
    count = 0
    for name, field in table.model_fields.items():
        for rule in field.metadata:
            if isinstance(rule, NotServed):
                count += 1
                for value in rule.neutral:
                    validated(table, LEAST[table] | {name: value})
                error = refused(table, **{name: {"something": "else"}})
                assert error.param == name
                assert "not supported by this server" in str(error)
                assert rule.instead in str(error)
    assert count >= 20


@pytest.mark.parametrize(("value", "neutral"), [(1, True), (1.0, True), (True, False), ("1", False), (2, False)])
def test_neutral_values_are_compared_as_json(value: Any, neutral: bool) -> None:
    body = {"prompt": "x", "best_of": value}
    if neutral:
        validated(CompletionRequest, body)
    else:
        assert refused(CompletionRequest, best_of=value).param == "best_of"


@TABLES
@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("topp", "top_p"), ("zzzz", None), ("é" * 500, None)],
)
def test_an_unknown_field_is_named_with_the_nearest(table: type[RequestObject], name: str, nearest: str | None) -> None:
    error = refused(table, **{name: 1})
    assert error.param == name[:64]
    assert (f'"{nearest}"' in str(error)) if nearest else ("did you mean" not in str(error))


def test_a_million_faults_make_one_error() -> None:
    many = 100_000
    for body in (
        {"prompt": ["a", *[1] * many]},
        {"prompt": "x", **{str(number): 1 for number in range(many)}},
        {"prompt": "x", "logit_bias": {f"x{number}": 1 for number in range(many)}},
        {"prompt": "x", "stream_options": {str(number): 1 for number in range(many)}},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            validated(CompletionRequest, body)
        assert len(str(caught.value)) < 400


def test_the_newer_budget_wins() -> None:
    fields = validated(CompletionRequest, {"prompt": "x", "max_tokens": 5, "max_completion_tokens": 3})
    assert fields.sampling_params().max_tokens == 3


@pytest.mark.parametrize(
    ("stop", "strings"), [("GH", ("GH",)), (["a", ""], ("a", "")), ([], ()), (None, ()), ("", ("",))]
)
def test_stops_are_one_or_several(stop: Any, strings: tuple[str, ...]) -> None:
    assert validated(CompletionRequest, {"prompt": "x", "stop": stop}).sampling_params().stop == strings


def test_bias_keys_become_token_ids() -> None:
    fields = validated(CompletionRequest, {"prompt": "x", "logit_bias": {"5": -100, "0": 1.5}})
    assert fields.sampling_params().logit_bias == {5: -100.0, 0: 1.5}


def test_two_keys_cannot_mean_one_token() -> None:
    with pytest.raises(InvalidRequestError, match="unlike '05'"):
        validated(CompletionRequest, {"prompt": "x", "logit_bias": {"5": -100, "05": 1.5}})


def test_messages_reach_the_template_whole() -> None:
    turns = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "lang": "en"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "1", "extra": {"kept": True}},
    ]
    fields = validated(ChatRequest, {"messages": turns})
    assert fields.template_messages() == [turns[0] | {"role": "system"}, *turns[1:]]


def test_marks_for_a_cache_are_inert() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    marked = [turns[0] | mark, turns[1] | mark | {"content": [part | mark for part in parts]}]
    assert validated(ChatRequest, {"messages": marked} | mark).template_messages() == turns
    assert validated(CompletionRequest, {"prompt": "x"} | mark).prompts() == ["x"]


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        (
            ChatRequest,
            {"response_format": {"type": "json_object"}},
            'Leave it out or send {"type":"text"}.',
        ),
        (ChatRequest, {"modalities": ["audio"]}, 'Leave it out or send ["text"].'),
        (ChatRequest, {"messages": []}, '"messages" = [] is not allowed: give 1 or more entries.'),
        (ChatRequest, {"request_id": "a b"}, '"request_id" = "a b" is not allowed: give 1 to 128 visible ASCII char'),
        (CompletionRequest, {"prompt": [1.0]}, '"prompt.0" = 1.0 is not allowed: give a whole number.'),
        (CompletionRequest, {"stop": "a" * 1025}, "is not allowed: give a string of at most 1024 characters."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_refusal_says_what_to_send(table: type[RequestObject], fields: dict[str, Any], message: str) -> None:
    assert message in str(refused(table, **fields))


def test_the_longest_stop_strings_pass() -> None:
    stop = ["é" * 1024] * 128
    assert validated(CompletionRequest, {"prompt": "x", "stop": stop}).sampling_params().stop == tuple(stop)


def test_no_reasoning_is_what_there_is() -> None:
    validated(ChatRequest, LEAST[ChatRequest] | {"reasoning_effort": "none"})


@TABLES
def test_a_repetition_penalty_that_is_not_given_is_left_to_the_model(table: type[RequestObject]) -> None:
    absent = validated(table, LEAST[table]).sampling_params()  # type: ignore[attr-defined]
    assert absent.repetition_penalty == SamplingParams().repetition_penalty
    given = validated(table, LEAST[table] | {"repetition_penalty": 1.5}).sampling_params()  # type: ignore[attr-defined]
    assert given.repetition_penalty == 1.5


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt", "allow_special", "tokenizer"])
def test_template_variables_cannot_take_the_place_of_parameters(name: str) -> None:
    assert refused(ChatRequest, chat_template_kwargs={name: True}).param == "chat_template_kwargs"
