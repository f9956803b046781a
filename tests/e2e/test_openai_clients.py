"""Unmodified clients on the real model: OpenAI's, blocking and asynchronous, and LangChain's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI

ALPHABET = "Here is the English alphabet: ABC"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2+2?"}]
ANSWER = "The answer to this classic math problem is 4."


@pytest.fixture(scope="module")
def client(real_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{real_server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert reply.model == "smollm2"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    assert abs(reply.created - time.time()) < 3600


def test_a_streamed_chat_with_log_probabilities(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 4, "logprobs": True}
    whole = client.chat.completions.create(model="any", top_logprobs=2, **fields)
    chunks = list(
        client.chat.completions.create(
            model="any", top_logprobs=2, stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    *chunks, last = chunks
    assert whole.choices[0].logprobs is not None
    entries = [entry for chunk in chunks if (lp := chunk.choices[0].logprobs) for entry in lp.content or ()]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content or ()]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content == "".join(entry.token for entry in entries)
    assert ANSWER.startswith(text)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage == whole.usage


def test_a_text(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="any", prompt=ALPHABET, max_tokens=3, temperature=0, logprobs=1, echo=True, stop=["XYZ"]
    )
    choice = reply.choices[0]
    assert choice.text == f"{ALPHABET}DEFGHI"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None


def test_a_streamed_text(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="any", prompt=ALPHABET, max_tokens=3, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "DEFGHI"


def test_requests_of_an_asynchronous_client_share_the_engine(real_server: str) -> None:
    async def chat(client: openai.AsyncOpenAI) -> str | None:
        reply = await client.chat.completions.create(model="any", messages=QUESTION, temperature=0, max_tokens=3)
        return reply.choices[0].message.content

    async def stream(client: openai.AsyncOpenAI) -> str:
        chunks = await client.completions.create(model="any", prompt=ALPHABET, max_tokens=3, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def run() -> tuple[Any, ...]:
        async with openai.AsyncOpenAI(base_url=f"http://{real_server}/v1", api_key="none", max_retries=0) as client:
            return tuple(await asyncio.gather(chat(client), stream(client), chat(client), stream(client)))

    first, text, second, again = asyncio.run(run())
    assert first == second
    assert ANSWER.startswith(first)
    assert text == again == "DEFGHI"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "smollm2"
    meta = client.models.retrieve("smollm2").model_extra["meta"]
    assert (meta["n_params"], meta["size"], meta["n_vocab"]) == (134515008, 96576768, 49152)


def test_errors_by_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="any", messages=QUESTION, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="any", prompt="a " * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_an_id_that_runs_is_a_conflict(client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine"}
    stream = client.completions.create(
        model="any",
        prompt=ALPHABET,
        max_tokens=500,
        stream=True,
        extra_headers=headers,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    with pytest.raises(openai.ConflictError):
        client.completions.create(model="any", prompt=ALPHABET, max_tokens=1, extra_headers=headers)
    stream.close()


@pytest.fixture
def langchain(real_server: str) -> Iterator[dict[str, Any]]:
    """A model's arguments; the connections are its own, because LangChain keeps those that it opens itself."""
    with openai.DefaultHttpxClient() as http_client:
        yield {
            "base_url": f"http://{real_server}/v1",
            "api_key": "none",
            "model": "smollm2",
            "temperature": 0,
            "max_retries": 0,
            "http_client": http_client,
        }


def test_langchain_chat(langchain: dict[str, Any]) -> None:
    model = ChatOpenAI(**langchain, max_tokens=4)
    message = model.invoke("What is 2+2?")
    assert ANSWER.startswith(message.content)
    assert message.usage_metadata["output_tokens"] == 4
    assert message.response_metadata["finish_reason"] == "length"
    chunks = list(model.stream("What is 2+2?"))
    assert "".join(chunk.content for chunk in chunks) == message.content


def test_langchain_options(langchain: dict[str, Any]) -> None:
    model = ChatOpenAI(**langchain, max_tokens=6, logprobs=True, top_logprobs=2, seed=1, stop=[" answer"])
    message = model.invoke([("system", "You are helpful."), ("human", "What is 2+2?")])
    entries = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(message.content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_langchain_completion(langchain: dict[str, Any]) -> None:
    model = OpenAI(**langchain, max_tokens=3)
    assert model.invoke(ALPHABET) == "DEFGHI"
    assert "".join(model.stream(ALPHABET)) == "DEFGHI"


def test_langchain_asynchronous(langchain: dict[str, Any]) -> None:
    async def run() -> list[Any]:
        async with openai.DefaultAsyncHttpxClient() as http_client:
            model = ChatOpenAI(**langchain, http_async_client=http_client, max_tokens=2)
            return await model.abatch(["What is 2+2?"] * 2)

    first, second = asyncio.run(run())
    assert first.content == second.content
