"""The real model through the offline API: known continuations, characters of several tokens, many requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pocketllm import LLM, InvalidRequestError, SamplingParams

ALPHABET = "Here is the English alphabet: ABC"
SMILEY = "\U0001f60a"
JAPANESE = "\u65e5\u672c\u8a9e"
CONTINUATION_BYTE = 235


@pytest.fixture(scope="module")
def llm(real_model: Path) -> Iterator[LLM]:
    with LLM(str(real_model), max_model_len=1024, max_num_seqs=16) as loaded:
        yield loaded


def greedy(count: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **fields)


@pytest.mark.parametrize(
    ("prompt", "count", "text"),
    [
        (ALPHABET, 14, "DEFGHIJKLMNOPQRSTUVWXYZ"),
        (SMILEY * 8, 12, SMILEY * 4),
        (JAPANESE * 4, 12, JAPANESE * 2),
        ("1, 2, 3, 4, 5,", 6, " 6, 7,"),
    ],
    ids=["alphabet", "smileys", "japanese", "numbers"],
)
def test_continuations(llm: LLM, real_model: Path, prompt: str, count: int, text: str) -> None:
    result = llm.generate(prompt, greedy(count))[0]
    assert (result.text, result.finish_reason) == (text, "length")
    assert "".join(event.text for event in llm.generate_stream(prompt, greedy(count))) == text


def test_chat(llm: LLM, real_model: Path) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    result = llm.chat(messages, greedy(40))[0]
    assert result.text == "The answer to this classic math problem is 4."
    assert (result.finish_reason, result.usage.completion_tokens) == ("stop", 12)
    counting = llm.chat([{"role": "user", "content": "Count from 1 to 10."}], greedy(12))[0]
    assert counting.text.startswith("1. 1\n2. 2\n3.")


def test_the_template_adds_its_own_system_turn_and_one_begin_token(llm: LLM, real_model: Path) -> None:
    prompt = llm.chat([{"role": "user", "content": "Hi"}], greedy(1))[0].prompt_token_ids
    assert llm.detokenize(prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt[:2] == tuple(llm.tokenize("<|im_start|>system"))
    assert 1 not in llm.tokenize("Hi")


def test_text_in_a_message_never_becomes_a_control_token(llm: LLM, real_model: Path) -> None:
    plain = llm.chat([{"role": "user", "content": "a b"}], greedy(1))[0].prompt_token_ids
    crafted = llm.chat([{"role": "user", "content": "a<|im_end|>b"}], greedy(1))[0].prompt_token_ids
    end = llm.tokenize("<|im_end|>")[0]
    assert crafted.count(end) == plain.count(end)
    assert llm.detokenize(crafted).count("<|im_end|>") == plain.count(end) + 1


@pytest.mark.parametrize("count", range(1, 8))
def test_a_budget_inside_a_character_drops_its_tail(llm: LLM, real_model: Path, count: int) -> None:
    result = llm.generate(SMILEY * 8, greedy(count))[0]
    events = list(llm.generate_stream(SMILEY * 8, greedy(count, stop=("never",))))
    assert result.text == "".join(event.text for event in events) == SMILEY * (count // 3)
    assert (result.usage.completion_tokens, result.finish_reason) == (count, "length")
    assert len(result.token_ids) == count - count % 3


def test_bytes_that_are_no_text_become_replacement_characters(llm: LLM, real_model: Path) -> None:
    result = llm.generate(ALPHABET, greedy(5, logit_bias={CONTINUATION_BYTE: 100}))[0]
    assert result.text == "\ufffd" * 5
    result.text.encode()


@pytest.mark.parametrize(
    ("text", "ids"),
    [("\u5b63", [18753, 113]), ("\u6b6f", [34978, 124]), ("\u00ed", [6160])],
    ids=["5B63", "6B6F", "ED"],
)
def test_the_byte_table(llm: LLM, real_model: Path, text: str, ids: list[int]) -> None:
    assert llm.tokenize(text) == ids
    assert llm.detokenize(ids) == text


@pytest.mark.parametrize("text", ["a , b . c !  it 's", "    .", "na\u00efve \U0001f44d\U0001f3fd\n\n\r\n", ALPHABET])
def test_round_trips_are_exact(llm: LLM, real_model: Path, text: str) -> None:
    assert llm.detokenize(llm.tokenize(text)) == text


@pytest.mark.parametrize("text", ["a\u0006b", "\u0004", "\U00040000", "\ud83d"])
def test_bytes_without_a_token_crash_nothing(llm: LLM, real_model: Path, text: str) -> None:
    llm.chat([{"role": "user", "content": text}], greedy(1))
    if llm.tokenize(text):
        llm.generate(text, greedy(1))
    else:
        with pytest.raises(InvalidRequestError, match="no tokens"):
            llm.generate(text, greedy(1))


def test_concurrent_streams_equal_their_solo_runs(llm: LLM, real_model: Path) -> None:
    """Where the model is sure of itself: the anchors' margins are far above what batching changes in the sums."""
    jobs = [(ALPHABET, n) for n in range(3, 15)] + [(SMILEY * 8, 12), (JAPANESE * 4, 12), ("1, 2, 3, 4, 5,", 6)]
    jobs.append((ALPHABET + " " * 300 + ALPHABET, 3))
    solo = [llm.generate(prompt, greedy(count))[0] for prompt, count in jobs]

    def stream(job: tuple[str, int]) -> str:
        return "".join(event.text for event in llm.generate_stream(job[0], greedy(job[1])))

    for _ in range(2):
        with ThreadPoolExecutor(len(jobs)) as pool:
            texts = list(pool.map(stream, jobs))
        assert texts == [result.text for result in solo]
    assert [result.text for result in llm.generate([job[0] for job in jobs], [greedy(job[1]) for job in jobs])] == texts


def test_a_seeded_reply_is_the_same_beside_others(llm: LLM, real_model: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=12)
    alone = llm.generate(ALPHABET, params)[0]
    assert alone.seed == 42
    together = llm.generate([ALPHABET, "Once upon a time"], [params, SamplingParams(temperature=1.0, max_tokens=12)])
    assert together[0].text == alone.text
    assert llm.generate(ALPHABET, SamplingParams(temperature=0.8, seed=43, max_tokens=12))[0].text != alone.text
