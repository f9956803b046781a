"""Replies that go on from given text: a final assistant message, and what belongs between prompt and suffix."""

from __future__ import annotations

from typing import Any

import pytest

from pocketllm.checkpoint.fill_in_middle import SPELLINGS, FillInMiddle, spelled_tokens
from pocketllm.checkpoint.template import ChatTemplate
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.prompts import chat_prompt
from tests.scripted import END, TEMPLATE, Vocabulary, scripted_engine
from tests.served import Serve, call
from tests.server.conftest import CHAT_PROMPT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def prompt_of(address: str, *turns: dict[str, Any], **fields: Any) -> str:
    answer = call(address, "POST", "/apply-template", {"messages": list(turns), **fields})
    return answer.json["prompt"] if answer.status == 200 else answer.error["message"]


def test_the_reply_holds_only_what_is_new(alphabet: str) -> None:
    turns = [USER, {"role": "assistant", "content": "DEF"}]
    body = call(alphabet, "POST", CHAT, {"messages": turns, "max_tokens": 2}).json
    assert body["usage"]["prompt_tokens"] == len(CHAT_PROMPT + "DEF")
    assert "DEF" not in body["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("turn", "fields", "prompt"),
    [
        ({"content": "DEF"}, {}, "[user]x>DEF"),
        ({"content": "DEF"}, {"continue_final_message": True}, "[user]x>DEF"),
        ({"content": "DEF"}, {"continue_final_message": True, "add_generation_prompt": False}, "[user]x>DEF"),
        ({"content": "DEF"}, {"add_generation_prompt": False}, "[user]x[assistant]DEF"),
        ({"content": "DEF"}, {"continue_final_message": False}, "[user]x[assistant]DEF>"),
        ({"content": [{"type": "text", "text": "D"}, {"type": "text", "text": "EF"}]}, {}, "[user]x>DEF"),
        ({"content": ""}, {}, "[user]x>"),
        ({"content": "DEF", "tool_calls": [CALL]}, {}, "[user]x[assistant]DEF>"),
    ],
    ids=str,
)
def test_what_the_model_reads(alphabet: str, turn: dict[str, Any], fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(alphabet, USER, {"role": "assistant", **turn}, **fields) == prompt


def test_there_must_be_something_to_continue(alphabet: str) -> None:
    for turns in ([USER], [USER, {"role": "assistant", "content": "a", "tool_calls": [CALL]}]):
        answer = call(alphabet, "POST", CHAT, {"messages": turns, "continue_final_message": True})
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")


def test_a_continued_text_never_becomes_a_special_token(vocabulary: Vocabulary) -> None:
    tokenizer = vocabulary.tokenizer
    template = ChatTemplate.for_tokenizer(TEMPLATE, tokenizer)
    prompt = chat_prompt(
        template,
        [USER, {"role": "assistant", "content": f"a{END}b"}],
        add_generation_prompt=True,
        continue_final_message=True,
        variables={},
        special_tokens=tokenizer.special_tokens,
    )
    assert prompt.text == f"{CHAT_PROMPT}a{END}b"
    assert vocabulary.end not in tokenizer.encode_chat(prompt)


def fim_vocabulary() -> Vocabulary:
    return Vocabulary(SPELLINGS[0])


@pytest.mark.parametrize("prompt", ["ab", [97, 98]], ids=str)
def test_a_suffix_is_led_up_to(serve: Serve, prompt: Any) -> None:
    vocabulary = fim_vocabulary()
    fim = vocabulary.tokenizer.fill_in_middle
    assert fim is not None
    address = serve(scripted_engine(lambda context: vocabulary.end, vocabulary))
    body = {"prompt": prompt, "suffix": f"c{END}", "return_token_ids": True}
    answer = call(address, "POST", COMPLETIONS, body).json
    assert answer["choices"][0]["prompt_token_ids"] == [
        fim.prefix,
        *b"ab",
        fim.suffix,
        *f"c{END}".encode(),
        fim.middle,
    ]
    answer = call(address, "POST", COMPLETIONS, body | {"suffix": ""}).json
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]
    assert call(address, "POST", COMPLETIONS, body | {"echo": True}).error["param"] == "echo"


def test_a_suffix_needs_the_tokens_for_it(alphabet: str) -> None:
    answer = call(alphabet, "POST", COMPLETIONS, {"prompt": "ab", "suffix": "c"})
    assert (answer.status, answer.error["param"]) == (400, "suffix")
    assert "fill-in-the-middle" in answer.error["message"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling[0])
def test_known_spellings(spelling: tuple[str, str, str]) -> None:
    ids = dict(zip(spelling, (7, 8, 9), strict=True))
    assert spelled_tokens(ids.get) == FillInMiddle(7, 8, 9)
    del ids[spelling[1]]
    assert spelled_tokens(ids.get) is None


def test_ids_of_the_metadata_come_before_spellings() -> None:
    tokens = [*"abcdefgh", *SPELLINGS[0]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 8 + [3] * 3,
        "tokenizer.ggml.merges": [],
    }
    named = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7}
    declared = {f"tokenizer.ggml.{role}_token_id": token for role, token in named.items()}
    assert Tokenizer.from_gguf(metadata).fill_in_middle == FillInMiddle(8, 9, 10)
    assert Tokenizer.from_gguf(metadata | declared).fill_in_middle == FillInMiddle(5, 6, 7)


def test_offsets_of_an_echoed_prompt(vocabulary: Vocabulary) -> None:
    tokenizer, end = vocabulary.tokenizer, vocabulary.end
    assert tokenizer.offsets("aé", list("aé".encode())) == [0, 1, 1]
    assert tokenizer.offsets("ab", [end, 97, 98, end]) == [0, 0, 1, 2], "what the tokenizer adds takes no room"
    assert tokenizer.offsets(f"{END}a", [end, 97]) == [0, len(END)], "what the text has does"
