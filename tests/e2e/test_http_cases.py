"""The real model over HTTP: faults that users of such servers have met, each with what is right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.engine.engine import Engine
from tests.forward import all_logits, load_runtime
from tests.golden import FOLDER
from tests.served import call, eventually, opened
from tests.server.fuzz import strict
from tests.server.joining import CHAT, COMPLETIONS, Reply, ask

ALPHABET = "Here is the English alphabet: ABC"
SMILEY = "\U0001f60a"
JAPANESE = "\u65e5\u672c\u8a9e"
NUMBERS = "1, 2, 3, 4, 5,"
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
CONTINUATION_BYTE, SMILEY_START = 235, 10813

# Two float32 runs with different batches; the golden run differs by more, see tests/models/test_golden.py.
TOLERANCE = 1e-3
GOLDEN_TOLERANCE = 5e-3

Fields = dict[str, Any]


def together(address: str, path: str, bodies: Sequence[Fields]) -> list[tuple[Fields, Reply, Reply]]:
    """Each body's reply whole and streamed, all at once."""
    with ThreadPoolExecutor(16) as pool:
        whole = [pool.submit(ask, address, path, False, **body) for body in bodies]
        streamed = [pool.submit(ask, address, path, True, **body) for body in bodies]
        return [(body, w.result(), s.result()) for body, w, s in zip(bodies, whole, streamed, strict=True)]


def both_modes(address: str, path: str, **body: Any) -> Reply:
    """The reply to a body, the same whole and streamed; one after the other, so that both are computed alike."""
    whole, streamed = (ask(address, path, stream, **body, cache_prompt=False) for stream in (False, True))
    assert whole.choices == streamed.choices
    return whole


def text_and_reason(reply: Reply) -> tuple[str, str | None]:
    return reply.choices[0].text, reply.choices[0].finish_reason


def test_stop_strings(real_server: str) -> None:
    cases: list[tuple[Any, int, str, str]] = [
        (["IJKL"], 9, "DEFGH", "stop"),
        (["DEFGHIJ"], 9, "", "stop"),
        (["IJZ"], 3, "DEFGHI", "length"),
        (None, 3, "DEFGHI", "length"),
        (["GH"], 9, "DEF", "stop"),
        ("GH", 9, "DEF", "stop"),
        (["GHX"], 3, "DEFGHI", "length"),
        ("", 3, "DEFGHI", "length"),
        ([""], 3, "DEFGHI", "length"),
        (["", "GH"], 9, "DEF", "stop"),
        ([], 3, "DEFGHI", "length"),
        (["HIJ", "GHIJK"], 9, "DEFG", "stop"),
        (["GHIJK", "HIJ"], 9, "DEFG", "stop"),
    ]
    bodies = [{"prompt": ALPHABET, "temperature": 0, "stop": stop, "max_tokens": most} for stop, most, *_ in cases]
    for case, (_, whole, streamed) in zip(cases, together(real_server, COMPLETIONS, bodies), strict=True):
        assert text_and_reason(whole) == text_and_reason(streamed) == case[2:], case


def test_a_stop_string_of_a_chat(real_server: str) -> None:
    bodies = [
        {"messages": QUESTION, "temperature": 0, "max_tokens": 4, "stop": stop} for stop in (None, [" answer"], ["zz"])
    ]
    texts = ["The answer to this", "The", "The answer to this"]
    for text, (_, whole, streamed) in zip(texts, together(real_server, CHAT, bodies), strict=True):
        assert text_and_reason(whole) == text_and_reason(streamed)
        assert whole.choices[0].text == text


def test_characters_are_never_split(real_server: str) -> None:
    bodies: list[Fields] = [
        {"prompt": SMILEY * 8, "max_tokens": 12},
        {"prompt": JAPANESE * 4, "max_tokens": 12},
        *({"prompt": SMILEY * 8, "max_tokens": most} for most in range(1, 8)),
        {"prompt": SMILEY * 8, "max_tokens": 5, "stop": ["zz"]},
    ]
    texts = [SMILEY * 4, JAPANESE * 2, *(SMILEY * (most // 3) for most in range(1, 8)), SMILEY]
    replies = together(real_server, COMPLETIONS, [body | {"temperature": 0} for body in bodies])
    for text, (body, whole, streamed) in zip(texts, replies, strict=True):
        assert text_and_reason(whole) == text_and_reason(streamed) == (text, "length")
        assert whole.usage["completion_tokens"] == body["max_tokens"]


def test_bytes_that_are_no_text(real_server: str) -> None:
    body = {"prompt": ALPHABET, "max_tokens": 5, "logit_bias": {str(CONTINUATION_BYTE): 100}, "temperature": 0}
    ((_, whole, streamed),) = together(real_server, COMPLETIONS, [body])
    assert text_and_reason(whole) == text_and_reason(streamed) == ("\ufffd" * 5, "length")


def test_alternatives_are_decoded_alone(real_server: str, real_engine: Engine) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    reply = ask(real_server, CHAT, False, **body, logit_bias={str(SMILEY_START): 100})
    known = {real_engine.tokenizer.token_bytes(token) for token in range(real_engine.tokenizer.vocab_size)}
    for item in reply.choices[0].logprobs["content"]:
        assert bytes(item["bytes"]) == SMILEY.encode()[:2]
        assert len(item["top_logprobs"]) == 5
        for other in item["top_logprobs"]:
            raw = bytes(other["bytes"])
            assert raw
            assert raw in known
            assert other["token"] == raw.decode("utf-8", "replace")


def test_a_seeded_reply_does_not_depend_on_its_neighbours(real_server: str) -> None:
    seeded = {"prompt": ALPHABET, "seed": 42, "temperature": 0.8, "max_tokens": 8}
    alone = ask(real_server, COMPLETIONS, False, **seeded)
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(ask, real_server, COMPLETIONS, False, prompt="Once", max_tokens=8) for _ in range(3)]
            beside = ask(real_server, COMPLETIONS, False, **seeded)
            for other in others:
                other.result()
        assert beside.comparable == alone.comparable


def test_seeds(real_server: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "Once"}), (CHAT, {"messages": QUESTION})):
        seeds = [123, 123, 0, 0, 2**40, -1]
        bodies = [{**prompt, "temperature": 0.9, "max_tokens": 5, "seed": seed} for seed in seeds]
        with ThreadPoolExecutor(len(bodies)) as pool:
            replies = list(pool.map(lambda body, path=path: ask(real_server, path, False, **body), bodies))
        assert replies[0].choices == replies[1].choices
        assert replies[2].choices == replies[3].choices
        assert [reply.seed for reply in replies[:5]] == seeds[:5]
        assert replies[5].seed >= 0
        assert len({reply.choices[0].text for reply in replies}) > 1


def test_hardly_any_temperature_is_greedy(real_server: str) -> None:
    cuts = {"top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    temperatures = ({"temperature": 0}, {"temperature": 0, **cuts}, {"temperature": 1e-10}, {"temperature": 1e-38})
    replies = together(real_server, COMPLETIONS, [{"prompt": NUMBERS, "max_tokens": 6, **t} for t in temperatures])
    assert {whole.choices[0].text for _, whole, _ in replies} == {" 6, 7,"}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"NaN"'])
def test_numbers_that_are_none(real_server: str, name: str, value: str) -> None:
    answer = call(real_server, "POST", COMPLETIONS, f'{{"prompt": "x", "{name}": {value}}}'.encode())
    assert answer.status == 400
    assert strict(answer.data)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("bias", [{"49152": 5}, {"-1": 5}, {"abc": 5}, {"5": "x"}, {"5": 1e9}, {"5": True}], ids=str)
def test_a_bias_on_what_is_no_token(real_server: str, bias: Fields) -> None:
    answer = call(real_server, "POST", COMPLETIONS, {"prompt": "x", "logit_bias": bias})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert "logit_bias" in answer.error["message"]


def test_penalties_do_not_show_in_log_probabilities_nor_count_the_prompt(real_server: str) -> None:
    body = {"prompt": NUMBERS, "max_tokens": 1, "logprobs": 5, "temperature": 0}
    replies = together(real_server, COMPLETIONS, [body | {"presence_penalty": penalty} for penalty in (0, 2)])
    (plain, penalised) = (whole.choices[0] for _, whole, _ in replies)
    assert penalised.text == plain.text
    assert penalised.logprobs["top_logprobs"][0] == pytest.approx(plain.logprobs["top_logprobs"][0], abs=TOLERANCE)


@pytest.fixture(scope="module")
def reference(real_model: Path) -> Any:
    """Log probabilities [T, vocab] of the next token after each of the tokens, from one plain forward pass."""
    runtime = load_runtime(real_model)

    def logprobs(tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        return torch.log_softmax(torch.from_numpy(all_logits(runtime, tokens)).double(), dim=1).numpy()

    return logprobs


@pytest.mark.parametrize("budget", [1, 0])
def test_a_scored_prompt_against_a_forward_pass(
    real_server: str, real_engine: Engine, reference: Any, budget: int
) -> None:
    prompt = "The step of boiling water is:"
    body = {"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": budget, "return_token_ids": True}
    reply = both_modes(real_server, COMPLETIONS, **body, temperature=0)
    entries, ids = reply.choices[0].logprobs, [*reply.prompt_token_ids[0], *reply.choices[0].token_ids]
    assert len(ids) == len(reply.prompt_token_ids[0]) + budget
    assert {len(values) for values in entries.values()} == {len(ids)}
    assert (entries["token_logprobs"][0], entries["top_logprobs"][0], entries["text_offset"][0]) == (None, None, 0)
    assert "".join(entries["tokens"]) == reply.choices[0].text
    expected = reference(ids)
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert entries["token_logprobs"][place] == pytest.approx(row[ids[place]], abs=TOLERANCE)
        likeliest = {real_engine.tokenizer.token_text(int(i)): row[i] for i in np.argsort(-row)[:5]}
        told = entries["top_logprobs"][place]
        assert sorted(told.values(), reverse=True)[:5] == pytest.approx(list(likeliest.values()), abs=TOLERANCE)


def test_a_chats_entries_against_a_forward_pass(real_server: str, reference: Any) -> None:
    body = {"messages": QUESTION, "temperature": 0, "top_p": 0.1, "max_tokens": 6, "logprobs": True, "top_logprobs": 5}
    for stop in (None, ["zzz"]):
        reply = both_modes(real_server, CHAT, **body, return_token_ids=True, stop=stop)
        choice, prompt = reply.choices[0], reply.prompt_token_ids[0]
        expected = reference([*prompt, *choice.token_ids])[len(prompt) - 1 :]
        for row, token, item in zip(expected, choice.token_ids, choice.logprobs["content"], strict=False):
            assert item["logprob"] == pytest.approx(row[token], abs=TOLERANCE)
            told = [other["logprob"] for other in item["top_logprobs"]]
            assert told == pytest.approx(np.sort(row)[::-1][:5].tolist(), abs=TOLERANCE)
            assert told == sorted(told, reverse=True)
            assert max(told) <= 0
            assert item["top_logprobs"][0]["bytes"] == item["bytes"]


def golden_prompts() -> list[Fields]:
    if FOLDER is None:
        return []
    prompts = json.loads((FOLDER / "smollm2" / "golden.json").read_text())["prompts"]
    return [prompt for prompt in prompts if prompt["n_ids"] < 45]


@pytest.mark.parametrize("prompt", golden_prompts(), ids=lambda prompt: prompt["name"])
def test_golden_log_probabilities(real_server: str, real_engine: Engine, prompt: Fields) -> None:
    # A first token that is a part of a character is told once the character is whole.
    body = {"prompt": prompt["ids"], "max_tokens": 4, "temperature": 0, "logprobs": 5}
    told = ask(real_server, COMPLETIONS, False, **body).choices[0].logprobs["top_logprobs"][0]
    expected = [logit - prompt["logsumexp"] for logit in prompt["top50_logits"][:5]]
    assert sorted(told.values(), reverse=True) == pytest.approx(expected, abs=GOLDEN_TOLERANCE)


def test_ruled_out_tokens_are_numbers(real_server: str) -> None:
    bodies = [
        (COMPLETIONS, {"prompt": ALPHABET, "echo": True, "logprobs": 1, "top_k": 1, "temperature": 1, "max_tokens": 2}),
        (
            CHAT,
            {"messages": QUESTION, "logprobs": True, "top_logprobs": 20, "max_tokens": 2, "logit_bias": {"504": -100}},
        ),
    ]
    for path, body in bodies:
        answer = strict(call(real_server, "POST", path, body).data)
        assert all(math.isfinite(number) for number in _numbers(answer))


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in _numbers(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("count", [21, 49152, -1, 10**9])
def test_too_many_alternatives(real_server: str, count: int) -> None:
    answer = call(real_server, "POST", CHAT, {"messages": QUESTION, "logprobs": True, "top_logprobs": count})
    assert (answer.status, answer.error["param"]) == (400, "top_logprobs")
    answer = call(real_server, "POST", COMPLETIONS, {"prompt": "x", "logprobs": count})
    assert (answer.status, answer.error["param"]) == (400, "logprobs")


def test_prompts_without_a_token(real_server: str) -> None:
    empty = [
        *((COMPLETIONS, {"prompt": prompt}) for prompt in ("", [""], [], [[]], "\u0004")),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}),
    ]
    for path, body in empty:
        assert call(real_server, "POST", path, body | {"max_tokens": 1}).status in (200, 400)
    assert text_and_reason(ask(real_server, COMPLETIONS, False, prompt=ALPHABET, max_tokens=1, temperature=0)) == (
        "DEF",
        "length",
    )


def test_as_many_tokens_as_asked_for(real_server: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": NUMBERS}), (CHAT, {"messages": QUESTION})):
        bodies = [{**prompt, "max_tokens": most, "temperature": 0} for most in (1, 2, 3)]
        for body, whole, streamed in together(real_server, path, bodies):
            assert whole.usage["completion_tokens"] == streamed.usage["completion_tokens"] == body["max_tokens"]
            assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "length"


@pytest.mark.parametrize("most", [-1, 0, 10**9, "5", 5.5, True])
def test_budgets_that_are_none(real_server: str, most: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": NUMBERS}), (CHAT, {"messages": QUESTION})):
        answer = call(real_server, "POST", path, {**prompt, "max_tokens": most})
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")


def test_the_second_turn_of_a_chat_computes_what_is_new(real_server: str) -> None:
    system = {"role": "system", "content": "You answer in one short sentence, and you never ask anything back."}
    first = [system, *QUESTION]
    answer = ask(real_server, CHAT, False, messages=first, max_tokens=12, temperature=0)
    turn = {"role": "assistant", "content": answer.choices[0].text}
    second = [*first, turn, {"role": "user", "content": "And what is 3+3?"}]
    body = {"messages": second, "max_tokens": 8, "temperature": 0}
    cold, warm = (ask(real_server, CHAT, False, **body, cache_prompt=cached) for cached in (False, True))
    assert cold.choices[0].text == warm.choices[0].text
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
    cached = warm.usage["prompt_tokens_details"]["cached_tokens"]
    assert answer.usage["prompt_tokens"] - 16 <= cached < warm.usage["prompt_tokens"]
    assert warm.timings["cache_n"] == cached


def test_parallel_replies_do_not_mix(real_server: str) -> None:
    prompts = [
        ALPHABET,
        NUMBERS,
        SMILEY * 8,
        JAPANESE * 4,
        ALPHABET + " " * 99 + ALPHABET,
        "2, 4, 6, 8,",
        "a b c d e f",
    ]
    bodies: list[Fields] = [{"prompt": prompt, "max_tokens": 3, "temperature": 0} for prompt in prompts]
    alone = [ask(real_server, COMPLETIONS, False, **body).choices for body in bodies]
    replies = together(real_server, COMPLETIONS, bodies)
    assert [whole.choices for _, whole, _ in replies] == [streamed.choices for *_, streamed in replies] == alone


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_frees_its_place(real_server: str, real_engine: Engine, stream: bool) -> None:
    before = real_engine.statistics().requests_total
    with opened(real_server, COMPLETIONS, {"prompt": ALPHABET, "stream": stream, "ignore_eos": True}) as connection:
        if stream:
            response = connection.getresponse()
            assert response.read(100)
            response.close()
        else:
            eventually(lambda: real_engine.statistics().requests_total > before)

    def idle() -> bool:
        statistics = real_engine.statistics()
        return statistics.running == statistics.waiting == 0

    eventually(idle)
    statistics = real_engine.statistics()
    assert statistics.kv_blocks_free == statistics.kv_blocks_total
    assert text_and_reason(ask(real_server, COMPLETIONS, False, prompt=ALPHABET, max_tokens=1, temperature=0)) == (
        "DEF",
        "length",
    )


def test_open_streams_leave_room_for_others(real_server: str) -> None:
    with ExitStack() as stack:
        for number in range(8):
            body = {"prompt": ALPHABET, "stream": True, "ignore_eos": True, "request_id": f"open{number}"}
            connection = stack.enter_context(opened(real_server, COMPLETIONS, body))
            response = connection.getresponse()
            stack.callback(response.close)
            assert response.read(1)
        assert call(real_server, "GET", "/health").json["busy"] is True
        assert call(real_server, "GET", "/v1/models").status == 200
        assert call(real_server, "POST", "/tokenize", {"content": "a"}).status == 200
        assert call(real_server, "DELETE", "/v1/requests/open0").status == 200


def test_a_stream_that_cannot_begin_is_a_plain_error(real_server: str) -> None:
    answer = call(real_server, "POST", COMPLETIONS, {"prompt": "x", "stream": True, "n": 0})
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert answer.headers["Content-Type"] == "application/json"


def test_a_reply_is_gone_on_with(real_server: str) -> None:
    start = "The answer to this classic"
    turns = [*QUESTION, {"role": "assistant", "content": start}]
    reply = ask(real_server, CHAT, False, messages=turns, temperature=0, max_tokens=4)
    assert reply.choices[0].text.startswith(" math problem is")
    rendered = call(real_server, "POST", "/apply-template", {"messages": turns}).json["prompt"]
    assert rendered.endswith(f"<|im_start|>assistant\n{start}")
    assert call(real_server, "POST", COMPLETIONS, {"prompt": "a", "suffix": "b"}).error["param"] == "suffix"


def test_tokens_of_the_real_vocabulary(real_server: str) -> None:
    for text, ids in (("\u5b63", [18753, 113]), ("\u6b6f", [34978, 124]), ("\u00ed", [6160])):
        assert call(real_server, "POST", "/tokenize", {"content": text}).json["tokens"] == ids
        assert call(real_server, "POST", "/detokenize", {"tokens": ids}).json["content"] == text
    counted = call(real_server, "POST", "/v1/chat/completions/input_tokens", {"messages": QUESTION}).json
    assert (
        counted["input_tokens"] == ask(real_server, CHAT, False, messages=QUESTION, max_tokens=1).usage["prompt_tokens"]
    )
