from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.served import call

PATH = "/v1/chat/completions"
TURNS: list[Any] = [{"role": "user", "content": "x"}]


@pytest.fixture
def client(alphabet: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{alphabet}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="any", messages=TURNS, n=2, seed=3)
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "scripted"
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert {choice.message.content for choice in reply.choices} == {"DEFGHIJKLMN"}
    assert {choice.message.role for choice in reply.choices} == {"assistant"}
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (8, 16, 24)


def test_a_streamed_reply(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="any", messages=TURNS, n=2, stream=True, max_tokens=4, stream_options={"include_usage": True}
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    *chunks, usage = chunks
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 8
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == "DEFGHIJ"
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason == "length"
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1], "both are opened before either goes on"


def test_a_stop_string_is_never_sent(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="any", messages=TURNS, stream=True, stop=["DEFGHIJ"])
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.delta.content for choice in choices] == ["", None]
    assert choices[-1].finish_reason == "stop"


def test_parts_and_developers_are_read(alphabet: str) -> None:
    turns = [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "x"}] * 2}]
    usage = call(alphabet, "POST", PATH, {"messages": turns, "max_tokens": 1}).json["usage"]
    assert usage["prompt_tokens"] == len("[system]d[user]xx>")


def test_the_assistant_need_not_be_opened(alphabet: str) -> None:
    body = {"messages": TURNS, "max_tokens": 1, "add_generation_prompt": False}
    assert call(alphabet, "POST", PATH, body).json["usage"]["prompt_tokens"] == len("[user]x")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "x"}, "prompt"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=str,
)
def test_refusals_name_the_field(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=TURNS, extra_body=fields)
    assert caught.value.param == param


def test_fields_at_their_defaults_are_accepted(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="any",
        messages=TURNS,
        frequency_penalty=0,
        logit_bias={},
        logprobs=False,
        parallel_tool_calls=True,
        presence_penalty=0,
        response_format={"type": "text"},
        service_tier="auto",
        stop=None,
        store=False,
        temperature=1,
        tool_choice="auto",
        tools=[],
        top_p=1,
        user="u",
        metadata={"a": "b"},
    )
    assert reply.choices[0].message.content == "DEFGHIJKLMN"


def test_a_reply_can_be_sent_back(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model="any", messages=TURNS).choices[0].message
    turns = [*TURNS, message.model_dump(), {"role": "user", "content": "y"}]
    reply = client.chat.completions.create(model="any", messages=turns, max_tokens=1)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("[user]x[assistant]DEFGHIJKLMN[user]y>")
