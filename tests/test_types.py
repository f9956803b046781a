"""Sampling parameters: every value in its range is kept, every other one is refused by name, value and range."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.types import SAMPLING_RANGES, Capabilities, NumberRange, SamplingParams, ScoreOutput, TokenLogprob

COLLECTIONS = {"logit_bias", "stop_token_ids"}
NUMBERS = {name: allowed for name, allowed in SAMPLING_RANGES.items() if name not in COLLECTIONS}
FIELDS = {field.name: field for field in dataclasses.fields(SamplingParams)}

# Written down a second time, from what the documentation says.
DOCUMENTED = {
    "max_tokens": "a whole number of at least 1",
    "temperature": "a number from 0 to 2",
    "top_p": "a number above 0 to 1",
    "top_k": "a whole number of at least -1",
    "min_p": "a number from 0 to 1",
    "seed": "a whole number from -1 to 18446744073709551615",
    "frequency_penalty": "a number from -2 to 2",
    "presence_penalty": "a number from -2 to 2",
    "repetition_penalty": "a number above 0 to 10",
    "logit_bias": "a number from -100 to 100",
    "n": "a whole number from 1 to 128",
    "stop_token_ids": "a whole number of at least 0",
    "min_tokens": "a whole number of at least 0",
    "logprobs": "a whole number from 0 to 20",
}


def inside(allowed: NumberRange) -> st.SearchStrategy[Any]:
    most = None if allowed.most == math.inf else allowed.most
    if allowed.integer:
        return st.integers(int(allowed.least), most)  # type: ignore[arg-type]
    return st.floats(allowed.least, most, exclude_min=allowed.open_below)


def outside(allowed: NumberRange) -> st.SearchStrategy[Any]:
    if allowed.integer:
        below: st.SearchStrategy[Any] = st.integers(max_value=int(allowed.least) - 1)
        return below if allowed.most == math.inf else below | st.integers(min_value=int(allowed.most) + 1)
    finite: dict[str, Any] = {"allow_nan": False, "allow_infinity": False}
    return st.floats(max_value=allowed.least, exclude_max=not allowed.open_below, **finite) | st.floats(
        min_value=allowed.most, exclude_min=True, **finite
    )


BIASES = st.dictionaries(inside(SAMPLING_RANGES["stop_token_ids"]), inside(SAMPLING_RANGES["logit_bias"]), max_size=5)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.none() | inside(allowed) for name, allowed in NUMBERS.items()},
    "logit_bias": BIASES,
    "stop": st.lists(st.text(), max_size=4).map(tuple),
    "stop_token_ids": st.lists(inside(SAMPLING_RANGES["stop_token_ids"]), max_size=4).map(tuple),
    "ignore_eos": st.booleans(),
    "cache_prompt": st.booleans(),
}


def test_the_table_says_what_the_documentation_says() -> None:
    assert {name: str(allowed) for name, allowed in SAMPLING_RANGES.items()} == DOCUMENTED
    assert VALUES.keys() == FIELDS.keys()


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_is_in_range_is_kept_and_round_trips(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        expected = FIELDS[name].default if value is None else value
        assert getattr(params, name) == (None if name == "seed" and value == -1 else expected)
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params) == params


@given(st.sampled_from(sorted(NUMBERS)).flatmap(lambda name: st.tuples(st.just(name), outside(NUMBERS[name]))))
def test_what_is_out_of_range_is_refused(case: tuple[str, Any]) -> None:
    name, value = case
    with pytest.raises(ValueError, match=r".") as refused:
        SamplingParams(**{name: value})
    assert str(refused.value) == f"{name} is {value!r}: give {DOCUMENTED[name]}"


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("value", [True, False, "1", b"1", math.nan, math.inf, -math.inf, [1], {}, 1j])
def test_what_is_no_number_is_a_type_error(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name} is ") as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert str(refused.value).endswith(f"give {DOCUMENTED[name]}")


@pytest.mark.parametrize("name", sorted(name for name, allowed in NUMBERS.items() if allowed.integer))
@pytest.mark.parametrize("value", [1.0, 1.5, Fraction(3, 2), np.float32(1)])
def test_whole_numbers_are_asked_for(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name} is .*: give a whole number"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_numbers_of_other_libraries_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        logit_bias={np.int32(3): np.float16(1)},
        stop_token_ids=[np.uint8(7)],
    )  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, top_k=5, logit_bias={3: 1.0}, stop_token_ids=(7,))
    values = (params.temperature, params.top_k, *params.logit_bias, *params.logit_bias.values(), *params.stop_token_ids)
    assert {type(value) for value in values} == {int, float}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"logit_bias": {5: 100.5}}, ValueError, r"logit_bias\[5\] is 100.5: give a number from -100 to 100"),
        ({"logit_bias": {5: "1"}}, TypeError, r"logit_bias\[5\] is '1'"),
        ({"logit_bias": {5: math.nan}}, TypeError, r"logit_bias\[5\] is nan"),
        ({"logit_bias": {-1: 1}}, ValueError, "logit_bias has the key -1: keys are token ids"),
        ({"logit_bias": {"5": 1}}, TypeError, "logit_bias has the key '5': keys are token ids"),
        ({"logit_bias": {True: 1}}, TypeError, "logit_bias has the key True"),
        ({"logit_bias": [5]}, TypeError, r"logit_bias is \[5\]: give a mapping"),
        ({"stop": 5}, TypeError, "stop is 5: give a string or a list of strings"),
        ({"stop": b"x"}, TypeError, "stop is b'x'"),
        ({"stop": ["x", None]}, TypeError, r"stop is \['x', None\]"),
        ({"stop_token_ids": "5"}, TypeError, "stop_token_ids is '5': give a list of token ids"),
        ({"stop_token_ids": [1, -1]}, ValueError, r"stop_token_ids\[1\] is -1: give a whole number of at least 0"),
        ({"stop_token_ids": [True]}, TypeError, r"stop_token_ids\[0\] is True"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos is 1: give true or false"),
        ({"beam_width": 1}, TypeError, "beam_width"),
    ],
)
def test_other_fields_are_checked_too(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_none_is_absent() -> None:
    assert SamplingParams(**dict.fromkeys(FIELDS)) == SamplingParams()
    assert SamplingParams(seed=-1).seed is None


def test_what_the_caller_gave_stays_the_callers() -> None:
    biases, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=biases, stop=stops)  # type: ignore[arg-type]
    biases[3] = 4.0
    stops.append("b")
    assert (params.logit_bias, params.stop) == ({1: 2.0}, ("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def scored(*logprobs: float) -> ScoreOutput:
    entries = (None, *(TokenLogprob(1, b"a", value) for value in logprobs))
    return ScoreOutput("id", (1,) * len(entries), (b"a",) * len(entries), entries)


def test_a_score_sums_up() -> None:
    score = scored(-1.0, -3.0)
    assert (score.total_logprob, score.perplexity) == (-4.0, pytest.approx(math.exp(2)))
    assert scored().total_logprob == 0.0
    assert math.isnan(scored().perplexity)
    assert scored(-math.inf).perplexity == math.inf
    assert scored(-1000.0).perplexity == math.inf


def test_capabilities_are_shown_a_line_each() -> None:
    values = dict.fromkeys((field.name for field in dataclasses.fields(Capabilities)), "x")
    shown = repr(Capabilities(**values))  # type: ignore[arg-type]
    assert len(shown.splitlines()) == len(values) + 2
    assert "\n    backend='x',\n" in shown
