"""`timings` and the proof: llama-server's definitions, for one choice and for several."""

from __future__ import annotations

import pytest

from pocketllm.protocol.openai.answer import Answer
from pocketllm.protocol.openai.timings import proof, timings
from pocketllm.types import CompletionOutput, RequestOutput, Timing, Usage


def choice(index: int, tokens: int, prefill: float, decode: float, waiting: float = 0.0) -> CompletionOutput:
    timing = Timing(waiting, prefill, decode)
    return CompletionOutput(index, "", (), "stop", completion_tokens=tokens, token_sha=f"sha{index}", timing=timing)


def answer(*prompts: list[CompletionOutput], cached: int = 0, seeds: tuple[int, ...] = ()) -> Answer:
    n = len(prompts[0])
    requests = [
        RequestOutput("r", (), tuple(own), seed, Usage(10, sum(c.completion_tokens for c in own), cached))
        for own, seed in zip(prompts, seeds or (1,) * len(prompts), strict=True)
    ]
    return Answer(requests, n, [(p * n + c.index, c) for p, own in enumerate(prompts) for c in own])


def test_one_choice() -> None:
    told = timings(answer([choice(0, 5, prefill=0.5, decode=2.0)], cached=4))
    assert told == {
        "cache_n": 4,
        "prompt_n": 6,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": pytest.approx(500 / 6),
        "prompt_per_second": pytest.approx(12.0),
        "predicted_n": 5,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
    }


def test_a_single_token_takes_no_step() -> None:
    told = timings(answer([choice(0, 1, prefill=0.5, decode=0.0)]))
    assert (told["predicted_n"], told["predicted_per_token_ms"], told["predicted_per_second"]) == (1, 0.0, 0.0)


def test_several_choices_give_a_single_readers_rates() -> None:
    told = timings(
        answer([choice(0, 5, 0.5, 2.0), choice(1, 3, 0.7, 1.0)], [choice(0, 2, 0.3, 0.5), choice(1, 1, 0.2, 0)])
    )
    assert (told["prompt_n"], told["prompt_ms"]) == (20, pytest.approx(700.0))
    assert (told["predicted_n"], told["predicted_ms"]) == (11, 3500.0)
    assert told["predicted_per_token_ms"] == 3500 / 7


def test_the_proof() -> None:
    given = answer([choice(0, 5, 0.5, 2.0, waiting=0.25), choice(1, 3, 0.125, 1.0, waiting=0.25)], seeds=(7,))
    assert proof(given) == {
        "token_sha": ["sha0", "sha1"],
        "seed": 7,
        "time_to_first_token_ms": 375.0,
        "drafted": 0,
        "accepted": 0,
    }


def test_nothing_written_has_no_first_token() -> None:
    told = proof(answer([choice(0, 0, 0.5, 0.0)], [choice(0, 0, 0.5, 0.0)], seeds=(1, 2)))
    assert (told["time_to_first_token_ms"], told["seed"]) == (None, None)
