"""The tokenizer's and the template's routes, in llama-server's dialect and in vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scripted import END, Vocabulary
from tests.served import Serve, call
from tests.server.conftest import CHAT_PROMPT, SMILEY

TURNS = [{"role": "user", "content": "x"}]
PREFIXES = pytest.mark.parametrize("prefix", ["", "/v1"])


@PREFIXES
def test_llama_servers_dialect(alphabet: str, vocabulary: Vocabulary, prefix: str) -> None:
    def tokens(**fields: Any) -> Any:
        return call(alphabet, "POST", f"{prefix}/tokenize", fields).json

    assert tokens(content="a b") == {"tokens": [97, 32, 98]}
    assert tokens(content="") == {"tokens": []}
    assert tokens(content=END) == {"tokens": [vocabulary.end]}
    assert tokens(content=END, parse_special=False) == {"tokens": list(END.encode())}
    smiley = list(SMILEY.encode())
    pieces = [{"id": byte, "piece": [byte]} for byte in smiley]
    assert tokens(content="a" + SMILEY, with_pieces=True) == {"tokens": [{"id": 97, "piece": "a"}, *pieces]}


@PREFIXES
def test_vllms_dialect(alphabet: str, prefix: str) -> None:
    answer = call(alphabet, "POST", f"{prefix}/tokenize", {"prompt": "ab", "model": "any"}).json
    assert answer == {"count": 2, "max_model_len": 1024, "tokens": [97, 98], "token_strs": None}
    answer = call(alphabet, "POST", f"{prefix}/tokenize", {"messages": TURNS, "return_token_strs": True}).json
    assert answer["tokens"] == list(CHAT_PROMPT.encode())
    assert "".join(answer["token_strs"]) == CHAT_PROMPT
    answer = call(alphabet, "POST", f"{prefix}/tokenize", {"messages": TURNS, "add_generation_prompt": False}).json
    assert answer["count"] == len("[user]x")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"content": None},
        {"content": "a", "prompt": "a"},
        {"prompt": "a", "messages": TURNS},
        {"content": 5},
        {"prompt": ["a"]},
        {"content": "a", "add_special_tokens": True},
        {"prompt": "a", "with_pieces": True},
        {"messages": []},
        {"messages": TURNS, "add_special_tokens": True},
    ],
    ids=str,
)
def test_a_body_of_neither_dialect_is_refused(alphabet: str, body: dict[str, Any]) -> None:
    answer = call(alphabet, "POST", "/tokenize", body)
    assert answer.status == 400
    assert set(answer.error) == {"code", "message", "type"}
    assert (answer.error["code"], answer.error["type"]) == (400, "invalid_request_error")
    assert set(call(alphabet, "POST", "/v1/tokenize", body).error) == {"message", "type", "param", "code"}


def test_null_is_absent(alphabet: str) -> None:
    assert call(alphabet, "POST", "/tokenize", {"content": "a", "prompt": None, "messages": None}).status == 200


@PREFIXES
def test_back_to_text(alphabet: str, prefix: str) -> None:
    answer = call(alphabet, "POST", f"{prefix}/detokenize", {"tokens": [97, *SMILEY.encode(), 256]})
    assert answer.json == {"content": "a" + SMILEY + END, "prompt": "a" + SMILEY + END}
    assert call(alphabet, "POST", f"{prefix}/detokenize", {"tokens": []}).json == {"content": "", "prompt": ""}
    for tokens in ([10**6], [-1], ["a"], None, "a"):
        answer = call(alphabet, "POST", f"{prefix}/detokenize", {"tokens": tokens})
        assert answer.status == 400
        assert "tokens" in answer.error["message"] or "vocabulary" in answer.error["message"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=20))
def test_texts_come_back(alphabet: str, text: str) -> None:
    tokens = call(alphabet, "POST", "/tokenize", {"content": text}).json["tokens"]
    assert call(alphabet, "POST", "/detokenize", {"tokens": tokens}).json["content"] == text


@PREFIXES
def test_the_template_is_applied_as_for_a_chat(alphabet: str, prefix: str) -> None:
    for body, text in (
        ({"messages": TURNS}, CHAT_PROMPT),
        ({"messages": TURNS, "add_generation_prompt": False}, "[user]x"),
        ({"messages": TURNS, "max_tokens": 5, "temperature": 0}, CHAT_PROMPT),
        ({"messages": [*TURNS, {"role": "assistant", "content": "DEF"}]}, CHAT_PROMPT + "DEF"),
    ):
        assert call(alphabet, "POST", f"{prefix}/apply-template", body).json == {"prompt": text}
        counted = call(alphabet, "POST", "/v1/chat/completions/input_tokens", body)
        assert counted.json == {"input_tokens": len(text)}
    assert call(alphabet, "POST", f"{prefix}/apply-template", {"messages": []}).status == 400
    assert call(alphabet, "POST", "/v1/chat/completions/input_tokens", {}).error["param"] == "messages"


def test_while_the_model_is_loaded(serve: Serve) -> None:
    address = serve(None)
    answer = call(address, "POST", "/tokenize", {"content": "a"})
    assert answer.status == 503
    assert answer.json == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    assert int(answer.headers["Retry-After"]) > 0


def test_paths_outside_v1_have_llama_servers_envelope(alphabet: str) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/tokenize", 405)):
        answer = call(alphabet, method, path)
        assert answer.status == status
        assert answer.error["code"] == status
        assert set(answer.error) == {"code", "message", "type"}
