"""Completing prompts, over scripted replies."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pocketllm.cli.generate import read_prompts, write_json, write_stream, write_texts
from pocketllm.cli.main import main
from pocketllm.errors import ConfigurationError
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary, scripted_engine

VOCABULARY = Vocabulary()
PROMPTS = ["a>", "be>", "\u00e9a>"]
REPLIES = ["A", "BE", "\u00c9A"]


def shout(context: tuple[int, ...]) -> int:
    prompt, _, reply = bytes(context).rpartition(b">")
    text = prompt.decode().upper().encode()
    return text[len(reply)] if len(reply) < len(text) else VOCABULARY.end


def model() -> LLM:
    return LLM.over(scripted_engine(shout, VOCABULARY))


def test_texts_stand_on_lines_of_their_own() -> None:
    out = io.StringIO()
    with model() as llm:
        write_texts(llm, PROMPTS, SamplingParams(), out)
    assert out.getvalue().splitlines() == REPLIES


def test_json_has_a_line_for_each_prompt() -> None:
    out = io.StringIO()
    with model() as llm:
        write_json(llm, PROMPTS, SamplingParams(seed=3), out)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(entry["prompt"], entry["text"]) for entry in found] == list(zip(PROMPTS, REPLIES, strict=True))
    assert {(entry["finish_reason"], entry["seed"], entry["logprobs"]) for entry in found} == {("stop", 3, None)}


def test_logprobs_stand_beside_the_tokens() -> None:
    out = io.StringIO()
    with model() as llm:
        write_json(llm, PROMPTS[:1], SamplingParams(logprobs=2), out)
    found = json.loads(out.getvalue())
    assert len(found["logprobs"]) == len(found["token_ids"])
    (entry,) = found["logprobs"]
    assert (entry["token"], entry["bytes"]) == ("A", [ord("A")])
    assert math.isfinite(entry["logprob"])
    assert len(entry["top_logprobs"]) == 2


def test_a_streamed_reply_ends_its_line() -> None:
    out = io.StringIO()
    with model() as llm:
        write_stream(llm, PROMPTS[2], SamplingParams(), out)
    assert out.getvalue() == REPLIES[2] + "\n"


LINES = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))


@given(st.lists(LINES.filter(str.strip), min_size=1), st.sampled_from(["\n", "\r\n", "\n \n"]))
def test_every_line_of_a_file_is_a_prompt(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], between: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "prompts.txt"
    path.write_bytes(between.join(lines).encode())
    assert read_prompts(path) == lines


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "there is no prompt in it"), (b"\n  \n", "there is no prompt"), (b"a\xff", "byte 1 is")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match=message):
        read_prompts(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--file", "prompts.txt"], "give a prompt, or --file"),
        (["--file", "prompts.txt", "--stream"], "leave --stream out"),
        (["hi", "--json", "--stream"], "leave --stream out"),
        (["hi", "--logprobs", "2"], "add --json"),
        (["hi", "--json", "--logprobs", "21"], "logprobs is 21: give a whole number from 0 to 20"),
        (["--file", "/nowhere/prompts.txt"], "/nowhere/prompts.txt: No such file"),
    ],
)
def test_what_does_not_go_together(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err
