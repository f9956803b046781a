from __future__ import annotations

from typing import Any

import pytest

from tests.served import call

PATH = "/v1/completions"


def text_of(address: str, stream: bool, **fields: Any) -> list[tuple[str, str]]:
    """Text and finish reason of every choice, in the order of their index."""
    answer = call(address, "POST", PATH, {"prompt": "ABC", **fields, "stream": stream})
    if not stream:
        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [(choice["text"], choice["finish_reason"]) for choice in choices]
    *chunks, done = answer.events
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in reasons, "nothing follows a choice's end"
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts.keys() == reasons.keys()
    return [(texts[index], reasons[index]) for index in sorted(texts)]


STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@STREAMED
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "DEFGHIJKLMN", "stop"),
        ({"max_tokens": 1}, "DEF", "length"),
        ({"max_tokens": 3, "stop": ["IJZ"]}, "DEFGHI", "length"),
        ({"max_tokens": None}, "DEFGHIJKLMN", "stop"),
        ({"max_completion_tokens": 2, "max_tokens": 5}, "DEFGH", "length"),
        ({"stop": "GH"}, "DEF", "stop"),
        ({"stop": ["GH"]}, "DEF", "stop"),
        ({"stop": ["IJKL"]}, "DEFGH", "stop"),
        ({"stop": ["DEFGHIJ"]}, "", "stop"),
        ({"stop": ["HIJ", "GHIJK"]}, "DEFG", "stop"),
        ({"stop": ["GHIJK", "HIJ"]}, "DEFG", "stop"),
        ({"stop": ["GHX"]}, "DEFGHIJKLMN", "stop"),
        ({"stop": ""}, "DEFGHIJKLMN", "stop"),
        ({"stop": [""]}, "DEFGHIJKLMN", "stop"),
        ({"stop": ["", "GH"]}, "DEF", "stop"),
        ({"stop": []}, "DEFGHIJKLMN", "stop"),
        ({"stop": None}, "DEFGHIJKLMN", "stop"),
        ({"echo": True, "max_tokens": 2}, "ABCDEFGH", "length"),
        ({"echo": True, "prompt": [65, 66, 67], "max_tokens": 2}, "ABCDEFGH", "length"),
    ],
    ids=str,
)
def test_one_choice(alphabet: str, stream: bool, fields: dict[str, Any], text: str, reason: str) -> None:
    assert text_of(alphabet, stream, **fields) == [(text, reason)]


@STREAMED
@pytest.mark.parametrize("budget", range(1, 8))
def test_no_character_is_split(alphabet: str, stream: bool, budget: int) -> None:
    expected = "\U0001f60a" * (budget // 2)
    assert text_of(alphabet, stream, prompt="xx", max_tokens=budget) == [(expected, "length")]


@STREAMED
def test_choices_are_numbered_prompt_by_prompt(alphabet: str, stream: bool) -> None:
    choices = text_of(alphabet, stream, prompt=["ABC", "xx"], n=2, max_tokens=2, echo=True)
    assert [text for text, _ in choices] == ["ABCDEFGH"] * 2 + ["xx\U0001f60a"] * 2


def test_usage_counts_executed_tokens(alphabet: str) -> None:
    body = call(alphabet, "POST", PATH, {"prompt": [[65, 66, 67], [65, 66, 67]], "n": 2, "seed": 5}).json
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 4 * 8,
        "total_tokens": 38,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["seed"] == 5
    assert body["object"] == "text_completion"
    assert body["model"] == "scripted"
    assert body["id"].startswith("cmpl-")


def test_a_drawn_seed_is_reported(alphabet: str) -> None:
    body = call(alphabet, "POST", PATH, {"prompt": "ABC"}).json
    again = call(alphabet, "POST", PATH, {"prompt": "ABC", "seed": body["seed"]}).json
    assert again["seed"] == body["seed"]


@pytest.mark.parametrize("asked", [None, False, True])
def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(alphabet: str, asked: bool | None) -> None:
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    *chunks, last, done = call(alphabet, "POST", PATH, {"prompt": "ABC", "stream": True, **options}).events
    assert done == "[DONE]"
    assert not any("usage" in chunk for chunk in chunks)
    assert ("usage" in last) is bool(asked)
    if asked:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8
        assert {chunk["id"] for chunk in chunks} == {last["id"]}


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ABC", ""]], ids=str)
def test_an_empty_prompt_is_refused_and_harms_nobody(alphabet: str, prompt: Any) -> None:
    for stream in (False, True):
        answer = call(alphabet, "POST", PATH, {"prompt": prompt, "stream": stream})
        assert answer.status == 400
        assert answer.error["param"].startswith("prompt")
    assert text_of(alphabet, False) == [("DEFGHIJKLMN", "stop")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [65, 10**6]}, "prompt"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": []}, "tools"),
    ],
    ids=str,
)
def test_refusals_come_before_the_stream(alphabet: str, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = call(alphabet, "POST", PATH, {"prompt": "ABC", **fields, "stream": stream})
        assert answer.status == 400
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"] == param


def test_a_reply_holds_so_many_numbers(alphabet: str) -> None:
    body = {"prompt": ["x" * 1000] * 4, "echo": True, "logprobs": 1, "n": 126, "max_tokens": 0}
    answer = call(alphabet, "POST", PATH, body)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert "1008000" in answer.error["message"]
    assert call(alphabet, "POST", PATH, body | {"logprobs": None, "n": 1}).status == 200


@pytest.mark.parametrize(("prompt", "budget"), [("x" * 2000, 1), ("x", 10**9), ("x" * 1024, None)])
def test_the_window_is_told(alphabet: str, prompt: str, budget: int | None) -> None:
    answer = call(alphabet, "POST", PATH, {"prompt": prompt, "max_tokens": budget})
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["n_prompt_tokens"] == len(prompt)
    assert answer.error["n_ctx"] == 1024
    assert answer.error["message"].startswith("This server's maximum context length is 1024 tokens")


def test_lone_surrogates_are_replaced(alphabet: str) -> None:
    for stream in (b"false", b"true"):
        body = rb'{"prompt": "x\ud83d", "stop": "\ud83d", "max_tokens": 2, "echo": true, "stream": ' + stream + b"}"
        answer = call(alphabet, "POST", PATH, body)
        assert answer.status == 200
        assert "x\ufffd" in answer.data.decode()
