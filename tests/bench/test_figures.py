"""The arithmetic of the figures: margins and partings, divergences, passages, limits, what others took."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.bench import agreement, prompts, report
from pocketllm.bench.__main__ import main
from pocketllm.bench.circumstances import OTHERS, Circumstances, unrest
from pocketllm.bench.contenders.base import log_softmax
from pocketllm.bench.limits import LIMITS, Limits
from pocketllm.bench.quality import divergence
from pocketllm.bench.speed import runs_with_median

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS)
def test_divergence_is_the_kl_of_distributions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((2, 3, 50)) * 4).astype(np.float32)
    wide = logits.astype(np.float64)
    p, q = np.exp(wide) / np.exp(wide).sum(axis=-1, keepdims=True)
    expected = (p * np.log(p / q)).sum(axis=-1)
    own, other = log_softmax(logits[0]), log_softmax(logits[1])
    np.testing.assert_allclose(divergence(own, other), expected, rtol=1e-4, atol=1e-5)
    assert np.all(divergence(own, own) == 0)


def test_divergence_leaves_padding_out() -> None:
    own = log_softmax(np.zeros((1, 4), dtype=np.float32))
    padded = np.concatenate([own, np.full((1, 2), -1e4, dtype=np.float32)], axis=1)
    assert divergence(own, padded) == divergence(padded, own) == 0


@given(SEEDS, st.integers(1, 4), st.integers(1, 5))
def test_margins_are_those_of_the_reply(seed: int, prompt_tokens: int, reply_tokens: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((prompt_tokens + reply_tokens, 7)).astype(np.float32)
    ordered = np.sort(rows, axis=1)[prompt_tokens - 1 : -1]
    found = agreement.margins(rows, prompt_tokens)
    np.testing.assert_allclose(found, ordered[:, -1] - ordered[:, -2], rtol=1e-6)
    assert len(found) == reply_tokens


def test_replies_part_at_the_first_difference() -> None:
    same = agreement.parting([1, 2, 3], [1, 2, 3], [9.0, 9.0, 9.0])
    tie = agreement.parting([1, 2, 3], [1, 5, 3], [9.0, 0.01, 9.0])
    wrong = agreement.parting([1, 2, 3], [4, 2, 3], [9.0, 9.0, 9.0])
    assert (same, tie, wrong) == (
        {"step": None, "margin": None},
        {"step": 1, "margin": 0.01},
        {"step": 0, "margin": 9.0},
    )
    expected = "1 equal, 1 part at a near tie, 1 differ; earliest at step 0, largest margin 9.00"
    assert agreement.summary([same, tie, wrong]) == expected


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 600))
def test_passages_begin_at_different_places(tokens: int, count: int, length: int) -> None:
    found = prompts.passages(list(range(tokens)), count, length)
    assert [len(passage) for passage in found] == [length] * count
    if count <= tokens:
        assert len({passage[0] for passage in found}) == count


def test_the_text_comes_along() -> None:
    assert len(prompts.text()) > 6000


def test_limits_are_measured() -> None:
    meter = Limits(threads=1, size=16, read_bytes=4096)
    try:
        readings = meter.measure()
    finally:
        meter.close()
    assert readings.keys() == LIMITS.keys()
    assert all(reading > 0 for reading in readings.values())


def test_circumstances_name_machine_and_versions() -> None:
    found = Circumstances().as_dict()
    assert {"machine", "python", "numpy", "commit", "command", "time", "CPU time of other processes"} <= found.keys()
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize(("share", "warned"), [("0%", False), ("5%", False), ("6%", True), ("unknown", False)])
def test_a_busy_machine_is_told(share: str, warned: bool) -> None:
    assert bool(unrest({OTHERS: share})) == warned


def test_medians() -> None:
    assert runs_with_median([1.23456, 9.0, 2.0]) == {"median": 2.0, "runs": [1.235, 9.0, 2.0]}


def test_a_table() -> None:
    assert report.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "²"])
def test_counts_are_whole_numbers(text: str) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--repeat", text])
