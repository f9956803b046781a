"""What the runtime is told to draw by: every parameter of the request, where the token stands, what came before it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.sampler import SamplingDefaults, resolve, sampling_rows
from pocketllm.engine.sequence import choice_seed
from pocketllm.kernels.sample.reference import rows as decision_rows
from pocketllm.runtimes.base import SamplingRows
from pocketllm.types import SamplingParams
from tests.engine.recording import recorded
from tests.engine.sequences import LETTER, VOCABULARY, new_sequence


def adjustments(rows: SamplingRows, row: int) -> dict[int, tuple[float, int, bool]]:
    """By token id: bias, count and whether it was seen."""
    entries = slice(*rows.adjust_start[row : row + 2].tolist())
    arrays = (rows.adjust_ids, rows.adjust_bias, rows.adjust_count, rows.adjust_seen)
    ids, *values = (array[entries].tolist() for array in arrays)
    assert ids == sorted(set(ids))
    return dict(zip(ids, zip(*values, strict=True), strict=True))


def test_every_parameter_reaches_the_runtime() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=1,
    )
    with recorded(lambda context: LETTER, VOCABULARY) as (engine, runtime):
        engine.submit([5, 6], params).result()
    (rows,) = runtime.rows
    drawn_by = {
        name: array.tolist()
        for name, array in rows.arrays().items()
        if not name.startswith("adjust") and name not in ("seed", "position")
    }
    assert drawn_by == {
        "temperature": [0.5],
        "top_p": [0.75],
        "top_k": [7],
        "min_p": [0.125],
        "frequency_penalty": [0.25],
        "presence_penalty": [-0.5],
        "repetition_penalty": [1.5],
    }


def test_what_the_request_leaves_open_is_the_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.25, top_p=0.5, top_k=9, min_p=0.75, repetition_penalty=1.5)
    off = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    filled, kept = resolve(SamplingParams(), defaults), resolve(SamplingParams(**off), defaults)
    for name, value in off.items():
        assert getattr(filled, name) == getattr(defaults, name)
        assert getattr(kept, name) == value


@pytest.mark.parametrize(("asked", "passed"), [(-1, 0), (0, 0), (1, 1), (40, 40), (2**40, 2**31 - 1)])
def test_top_k(asked: int, passed: int) -> None:
    assert sampling_rows([new_sequence([1], SamplingParams(top_k=asked))]).top_k.tolist() == [passed]


def test_the_position_counts_from_the_beginning_of_the_prompt() -> None:
    with recorded(lambda context: LETTER, VOCABULARY, prefill_chunk=2) as (engine, runtime):
        engine.submit([7] * 5, SamplingParams(max_tokens=3)).result()
    assert [rows.position.tolist() for rows in runtime.rows] == [[5], [6], [7]]


ids = st.integers(0, 11)
penalties = st.sampled_from([0.0, 0.5, -1.25])


@given(
    st.lists(ids, min_size=1, max_size=12),
    st.lists(ids, max_size=12),
    penalties,
    penalties,
    st.sampled_from([1.0, 1.5, 0.5]),
    st.dictionaries(ids, st.sampled_from([-3.0, 0.5, 2.0]), max_size=4),
)
def test_the_rows_mean_what_the_parameters_say(
    prompt: list[int],
    reply: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition, logit_bias=bias
    )
    first, plain = new_sequence(prompt, params), new_sequence([3])
    for token in reply:
        first.accept(token)
    logits = np.linspace(-2, 2, 12, dtype=np.float32)
    rows = sampling_rows([plain, first, plain])
    before, adjusted, after = decision_rows({"logits": np.stack([logits] * 3), **rows.arrays()})

    generated = Counter(reply)
    expected = logits.astype(np.float64)
    for token in range(12):
        value = expected[token] + bias.get(token, 0.0)
        if token in prompt or token in reply:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * generated[token] + (presence if generated[token] else 0.0)
        expected[token] = value
    np.testing.assert_allclose(adjusted["x"], expected, rtol=1e-12)
    for other in (before, after):
        np.testing.assert_array_equal(other["x"], logits)


def test_counts_are_the_replys_and_seen_is_the_prompts_too() -> None:
    sequence = new_sequence([5, 5, 6], SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5))
    for token in (6, 7, 7):
        sequence.accept(token)
    assert adjustments(sampling_rows([sequence]), 0) == {5: (0.0, 0, True), 6: (0.0, 1, True), 7: (0.0, 2, True)}


def test_a_bias_alone_marks_nothing_as_seen() -> None:
    sequence = new_sequence([5, 6], SamplingParams(logit_bias={6: -1.5, 9: 4.0}))
    sequence.accept(6)
    assert adjustments(sampling_rows([sequence]), 0) == {6: (-1.5, 1, False), 9: (4.0, 0, False)}


def test_counts_and_bias_go_on_over_the_steps() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, logit_bias={9: 2.0}, max_tokens=3)
    with recorded(lambda context: LETTER, VOCABULARY) as (engine, runtime):
        engine.submit([5], params).result()
    assert [adjustments(rows, 0) for rows in runtime.rows] == [
        {9: (2.0, 0, False)},
        {9: (2.0, 0, False), LETTER: (0.0, 1, True)},
        {9: (2.0, 0, False), LETTER: (0.0, 2, True)},
    ]


def test_ends_are_banned_until_the_reply_has_min_tokens() -> None:
    end, stop = VOCABULARY.end, 90
    params = SamplingParams(
        temperature=0.0, min_tokens=2, max_tokens=4, stop_token_ids=(stop,), logit_bias={stop: 100, 9: 1.0}
    )
    with recorded(lambda context: LETTER, VOCABULARY) as (engine, runtime):
        result = engine.submit([5], params).result()
    assert list(result.token_ids) == [LETTER, LETTER]
    banned = {9: (1.0, 0, False), stop: (-np.inf, 0, False), end: (-np.inf, 0, False)}
    allowed = {9: (1.0, 0, False), stop: (100.0, 0, False)}
    assert [adjustments(rows, 0) for rows in runtime.rows] == [banned, banned, allowed]


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [
        (0, 0, 0x1FB0B259359CF224),
        (0, 1, 0x49A1B97C1FB87157),
        (1, 0, 0x4577167B8B031757),
        (11, 3, 0x0C8B6EBB39792097),
        (2**64 - 1, 127, 0xFD98994DC2FCFAC0),
    ],
)
def test_a_choices_seed_stays_what_it_is(seed: int, index: int, expected: int) -> None:
    """Replies that were recorded with a seed must come again with every later version."""
    assert choice_seed(seed, index) == expected


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 127)), min_size=2, max_size=20, unique=True))
def test_seeds_of_choices_are_distinct(choices: list[tuple[int, int]]) -> None:
    seeds = [choice_seed(seed, index) for seed, index in choices]
    assert len(set(seeds)) == len(choices)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_neighbouring_seeds_and_choices_do_not_meet() -> None:
    assert len({choice_seed(seed, index) for seed in range(32) for index in range(32)}) == 32 * 32


def test_every_choice_keeps_its_seed_over_the_steps() -> None:
    with recorded(lambda context: LETTER, VOCABULARY) as (engine, runtime):
        engine.submit([5], SamplingParams(seed=11, n=3, max_tokens=2)).result()
    expected = [choice_seed(11, index) for index in range(3)]
    assert [rows.seed.tolist() for rows in runtime.rows] == [expected, expected]
