"""Every mix of endpoint, mode, stop, log probabilities, choices and echo: the same reply, whole and streamed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.scripted import Vocabulary, scripted_engine
from tests.served import Serve, call
from tests.server.conftest import ALPHABET, CHAT_PROMPT, SMILEY
from tests.server.joining import CHAT, COMPLETIONS, Choice, ask

SURE = 20.0
"""Logit of the scripted token above normally distributed ones."""

STOPS: list[Any] = [None, "GH", ["GHX"], ["IJKL"], ["LMN", "KL"]]
TURNS = [{"role": "user", "content": "x"}]


def noisy(script: Callable[[tuple[int, ...]], int], size: int) -> Callable[[tuple[int, ...]], Any]:
    """Logits in which the scripted token is the likeliest, and everything depends on the context."""

    def logits(context: tuple[int, ...]) -> Any:
        row = np.random.default_rng(list(context)).normal(size=size).astype(np.float32)
        row[script(context)] = SURE
        return row

    return logits


@pytest.fixture
def address(serve: Serve, vocabulary: Vocabulary) -> str:
    letters = [*vocabulary.ids(*ALPHABET), vocabulary.end]
    smiley = vocabulary.ids(SMILEY.encode()[:3], SMILEY.encode()[3:])

    def script(context: tuple[int, ...]) -> int:
        for prompt in ("ABC", CHAT_PROMPT):
            if context[: len(prompt)] == tuple(prompt.encode()):
                return letters[len(context) - len(prompt)]
        return smiley[len(context) % 2]

    return serve(scripted_engine(noisy(script, vocabulary.size), vocabulary, max_sequences=4))


def check_entries(choice: Choice, echo: str, logprobs: int | None) -> None:
    """Entries cover the text: each offset is where its token stands, and bytes join to the text."""
    if logprobs is None:
        assert choice.logprobs == {}
        return
    if "content" in choice.logprobs:
        raw = b"".join(bytes(item["bytes"]) for item in choice.logprobs["content"])
        assert all(len(item["top_logprobs"]) == logprobs for item in choice.logprobs["content"])
        assert raw.startswith(choice.text.encode())
        return
    tokens, offsets = choice.logprobs.get("tokens", []), choice.logprobs.get("text_offset", [])
    assert len(offsets) == len(choice.token_ids) + len(echo)
    for token, offset in zip(tokens, offsets, strict=True):
        assert (
            token.startswith("bytes:")
            or choice.text[offset:].startswith(token)
            or offset + len(token) > len(choice.text)
        )
    for own, top in zip(
        choice.logprobs.get("token_logprobs", []), choice.logprobs.get("top_logprobs", []), strict=True
    ):
        assert (own is None) == (top is None)
        assert top is None or max(logprobs, 1) <= len(top) <= logprobs + 1


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("prompt", ["ABC", "xx"])
def test_completions(address: str, stop: Any, prompt: str) -> None:
    texts = set()
    for logprobs, n, echo, budget in itertools.product([None, 0, 3], [1, 2], [False, True], [4, 9]):
        fields = {"prompt": prompt, "stop": stop, "logprobs": logprobs, "n": n, "echo": echo, "max_tokens": budget}
        fields |= {"seed": 5, "temperature": 0, "return_token_ids": True}
        whole, streamed = (ask(address, COMPLETIONS, stream, **fields) for stream in (False, True))
        assert whole.comparable == streamed.comparable, fields
        assert len(whole.choices) == n
        for choice in whole.choices:
            assert choice.text.startswith(prompt if echo else "")
            check_entries(choice, prompt if echo else "", logprobs)
            texts.add((budget, choice.text.removeprefix(prompt if echo else "")))
    assert len(texts) == len({budget for budget, _ in texts}), "one text for each budget, whatever else is asked for"


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_chats(address: str, stop: Any) -> None:
    for logprobs, n, budget in itertools.product([None, 0, 3], [1, 2], [4, 9]):
        fields: dict[str, Any] = {"messages": TURNS, "stop": stop, "n": n, "max_tokens": budget}
        fields |= {"seed": 5, "temperature": 0, "return_token_ids": True}
        if logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": logprobs}
        whole, streamed = (ask(address, CHAT, stream, **fields) for stream in (False, True))
        assert whole.comparable == streamed.comparable, fields
        plain = ask(address, COMPLETIONS, False, prompt="ABC", stop=stop, max_tokens=budget, temperature=0)
        for choice in whole.choices:
            check_entries(choice, "", logprobs)
            assert (choice.text, choice.finish_reason) == (plain.choices[0].text, plain.choices[0].finish_reason)


@pytest.mark.parametrize("prompt", ["ABC", ["ABC", "xx"], [65, 66, 67], [[65, 66, 67], [120, 120]]], ids=str)
def test_prompts_of_every_kind_are_scored(address: str, prompt: Any) -> None:
    for echo, logprobs, stream, budget in itertools.product([False, True], [None, 2], [False, True], [1, 2]):
        fields = {"prompt": prompt, "echo": echo, "logprobs": logprobs, "max_tokens": budget, "temperature": 0}
        reply = ask(address, COMPLETIONS, stream, **fields, return_token_ids=True)
        for text, choice in zip(("ABC", "xx"), reply.choices, strict=False):
            check_entries(choice, text if echo else "", logprobs)
            if logprobs and echo:
                assert (choice.logprobs["token_logprobs"][0], choice.logprobs["top_logprobs"][0]) == (None, None)
                assert choice.logprobs["tokens"][: len(text)] == list(text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_is_scored_without_a_reply(address: str, stream: bool) -> None:
    fields = {"prompt": ["ABC", "xx"], "echo": True, "logprobs": 2, "n": 2}
    scored = ask(address, COMPLETIONS, stream, **fields, max_tokens=0)
    written = ask(address, COMPLETIONS, stream, **fields, max_tokens=1, temperature=0)
    assert [choice.text for choice in scored.choices] == ["ABC", "ABC", "xx", "xx"]
    assert [choice.finish_reason for choice in scored.choices] == ["length"] * 4
    assert scored.usage["completion_tokens"] == 0
    for less, more in zip(scored.choices, written.choices, strict=True):
        count = len(less.text)
        assert len(less.logprobs["tokens"]) == count
        assert less.logprobs == {name: values[:count] for name, values in more.logprobs.items()}


def test_a_prompt_can_be_given_back_alone(address: str) -> None:
    reply = ask(address, COMPLETIONS, False, prompt="ABC", echo=True, max_tokens=0)
    assert (reply.choices[0].text, reply.choices[0].logprobs) == ("ABC", {})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
def test_timings_and_proof(address: str, path: str, n: int) -> None:
    prompt: dict[str, Any] = {"messages": TURNS} if path == CHAT else {"prompt": "ABC"}
    for stream in (False, True):
        reply = ask(address, path, stream, **prompt, n=n, seed=9, max_tokens=5)
        told = reply.timings
        assert told["cache_n"] + told["prompt_n"] == reply.usage["prompt_tokens"]
        assert told["predicted_n"] == reply.usage["completion_tokens"] == 5 * n
        assert told["predicted_per_token_ms"] * 4 * n == pytest.approx(told["predicted_ms"])
        assert reply.proof["seed"] == 9
        assert len(reply.proof["token_sha"]) == n
        assert reply.proof["time_to_first_token_ms"] > 0
        assert (reply.proof["drafted"], reply.proof["accepted"]) == (0, 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_without_usage_closes_with_its_last_choice(address: str, path: str) -> None:
    body: dict[str, Any] = {"messages": TURNS} if path == CHAT else {"prompt": "ABC"}
    *chunks, done = call(address, "POST", path, body | {"stream": True, "n": 2, "max_tokens": 3}).events
    assert done == "[DONE]"
    assert [("timings" in chunk, "pocketllm" in chunk) for chunk in chunks[:-1]] == [(False, False)] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["timings"]["predicted_n"] == 6
    assert len(chunks[-1]["pocketllm"]["token_sha"]) == 2


def test_token_ids(address: str) -> None:
    for path, prompt, expected in (
        (COMPLETIONS, {"prompt": ["ABC", "xx"]}, [[65, 66, 67], [120, 120]]),
        (CHAT, {"messages": TURNS}, [list(CHAT_PROMPT.encode())]),
    ):
        for stream in (False, True):
            reply = ask(address, path, stream, **prompt, max_tokens=2, return_token_ids=True)
            assert reply.prompt_token_ids == expected
            assert [len(choice.token_ids) for choice in reply.choices] == [2] * len(expected)
            silent = ask(address, path, stream, **prompt, max_tokens=2)
            assert (silent.prompt_token_ids, silent.choices[0].token_ids) == ([], [])


def test_banned_tokens_and_cuts_leave_strict_json(address: str) -> None:
    fields = {"prompt": "ABC", "echo": True, "logprobs": 20, "top_k": 1, "logit_bias": {"68": -100}, "max_tokens": 3}
    for stream in (False, True):
        data = call(address, "POST", COMPLETIONS, fields | {"stream": stream}).data.decode()
        assert "Infinity" not in data
        assert "NaN" not in data
