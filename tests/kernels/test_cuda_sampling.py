"""Sampling and scores in CUDA C: rows of several segments, cuts that many candidates miss, rows alone and together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check, in_storage, run
from pocketllm.kernels.contract import Case, NoScalars
from pocketllm.kernels.jit.cuda_emulator.settings import Build, emulated
from pocketllm.kernels.registry import spec
from pocketllm.kernels.sample import impl_cupy
from pocketllm.kernels.score.spec import Score

Arrays = dict[str, npt.NDArray[Any]]

EMULATED = backend("cupy", "cpu")
MODES = pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
BUILDS = pytest.mark.parametrize("build", ["plain", "checked"])


def sampling(logits: npt.NDArray[Any], seed: int = 0, **numbers: Any) -> Case:
    """Rows without a cut at temperature 1, but for `numbers`, which hold for all rows or give one for each."""
    rows = len(logits)
    rng = np.random.default_rng(seed)
    defaults: dict[str, Any] = {"temperature": 1, "top_p": 1, "min_p": 0, "top_k": 0, "repetition_penalty": 1}
    defaults |= {"frequency_penalty": 0, "presence_penalty": 0, "position": rng.integers(0, 2**31, rows)}
    defaults |= {"seed": rng.integers(0, 2**64, rows, dtype=np.uint64)} | numbers
    arrays = {
        operand.name: np.broadcast_to(np.asarray(defaults[operand.name], operand.dtype), rows).copy()
        for operand in spec("sample").operands
        if operand.name in defaults
    }
    return Case(NoScalars(), {}, {"logits": logits.astype(np.float32), **arrays})


def rows_of(case: Case, rows: list[int]) -> Case:
    """Some rows of a case of either op, in this order."""
    arrays = {name: array[rows] for name, array in case.arrays.items() if not name.startswith("adjust_")}
    if "adjust_start" in case.arrays:
        start = case.arrays["adjust_start"]
        entries = np.concatenate([np.arange(start[row], start[row + 1]) for row in rows])
        arrays["adjust_start"] = np.cumsum([0, *(start[row + 1] - start[row] for row in rows)]).astype(np.int32)
        for name in ("ids", "bias", "count", "seen"):
            arrays[f"adjust_{name}"] = case.arrays[f"adjust_{name}"][entries]
    return Case(case.scalars, {}, arrays)


def results(op: str, case: Case, mode: Mode) -> Arrays:
    return run(spec(op), in_storage(spec(op), case, mode), EMULATED, mode, EMULATED.table(mode), None)


@pytest.mark.parametrize("op", ["sample", "score"])
@pytest.mark.parametrize(("build", "order"), [("checked", 0), ("checked", 3), ("plain", 1), ("plain", 2)])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_rule_is_broken_in_any_order(op: str, build: Build, order: int, seed: int) -> None:
    contract = spec(op)
    rng = np.random.default_rng(seed)
    dims = {name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()}
    with emulated(build, order):
        check(contract, contract.make_case(rng, dims), EMULATED, FLOAT32)


@MODES
@pytest.mark.parametrize("seed", range(8))
def test_sampling_from_several_segments(seed: int, mode: Mode) -> None:
    case = spec("sample").make_case(np.random.default_rng(seed), {"R": 4, "V": 3 * impl_cupy._SEGMENT + 5})
    assert check(spec("sample"), case, EMULATED, mode).near_ties == 0


@BUILDS
def test_sampling_from_rows_that_a_block_of_more_threads_decides_about(build: Build) -> None:
    case = spec("sample").make_case(np.random.default_rng(5), {"R": 3, "V": impl_cupy._LONG_ROW + 1})
    case.arrays.update(temperature=np.ones(3, np.float32), top_k=np.full(3, 40, np.int32))
    case.arrays["top_p"] = np.array([0.9, 1, 0.5], np.float32)
    with emulated(build):
        assert check(spec("sample"), case, EMULATED, FLOAT32).near_ties == 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(1, 1500),
    steps=st.sampled_from([0.0, 1.0, 8.0]),
    temperature=st.sampled_from([1e-30, 0.01, 1.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 20, 300]),
    top_p=st.sampled_from([1e-6, 0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
)
def test_cuts_of_flat_and_steep_rows_with_equal_logits(
    seed: int, vocabulary: int, steps: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).standard_normal((3, vocabulary)) * [[0.0], [0.5], [6.0]]
    if steps:
        logits = np.round(logits * steps) / steps
    case = sampling(logits, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert check(spec("sample"), case, EMULATED, FLOAT32).near_ties == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_nucleus_within_the_largest_few(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal((100, 12)), 1)
    case = sampling(logits, seed, top_k=rng.integers(1, 12, 100), top_p=rng.uniform(0, 1, 100))
    assert check(spec("sample"), case, EMULATED, FLOAT32).near_ties == 0


def test_a_spoilt_logit_counts_behind_a_mask_and_an_adjustment() -> None:
    case = sampling(np.zeros((4, 40)), temperature=0)
    case.arrays["logits"][:2, 33] = np.nan, np.inf
    case.arrays["allowed"] = np.full((4, 2), 1, np.uint32)
    case.arrays["allowed"][3] = 0
    case.arrays.update(
        adjust_start=np.array([0, 1, 2, 2, 2], np.int32),
        adjust_ids=np.array([33, 33], np.int32),
        adjust_bias=np.array([-1, -np.inf], np.float32),
        adjust_count=np.ones(2, np.int32),
        adjust_seen=np.ones(2, bool),
    )
    assert results("sample", case, FLOAT32)["out"].tolist() == [-1, -1, 0, -1]


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_a_token_depends_on_its_row_alone(seed: int, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 1300
    case = spec("sample").make_case(np.random.default_rng(seed), {"R": 7, "V": vocabulary})
    if seed % 2:  # so that the first candidate is often cut off
        case.arrays.update(temperature=np.full(7, 3, np.float32), top_p=np.full(7, 0.3, np.float32))
    together = results("sample", case, mode)["out"]
    order = np.random.default_rng(seed).permutation(7).tolist()
    assert (results("sample", rows_of(case, order), mode)["out"] == together[order]).all()
    for row in range(7):
        assert results("sample", rows_of(case, [row]), mode)["out"] == together[row]
    monkeypatch.setattr(impl_cupy, "_WORKSPACE", 3 * 8 * vocabulary)
    assert (results("sample", case, mode)["out"] == together).all()


@pytest.mark.parametrize("cuts", [{"top_k": 3}, {"top_p": 0.85}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.85}], ids=str)
def test_frequencies_are_those_of_the_three_likeliest(cuts: dict[str, Any]) -> None:
    draws = 300
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    case = sampling(np.tile(logits, (draws, 1)), **cuts)
    counts = np.bincount(results("sample", case, FLOAT32)["out"], minlength=4)
    expected = np.array([4, 3, 2]) / 9 * draws
    assert counts[3] == 0
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 20  # chi-squared, two degrees of freedom: p < 5e-5


@MODES
@BUILDS
def test_scores_of_several_segments_with_equal_logits(build: Build, mode: Mode) -> None:
    rng = np.random.default_rng(7)
    logits = np.round(rng.standard_normal((3, 4500)) * 2).astype(np.float32)
    logits[1] = -np.inf
    logits[1, [4400, 17, 2100]] = 1.5
    logits[2] = 0.25
    case = Case(Score(20), {}, {"logits": logits, "targets": np.array([4499, -1, 0], np.int32)})
    with emulated(build, seed=1):
        check(spec("score"), case, EMULATED, mode)
        found = results("score", case, mode)
    assert found["top_ids"][1].tolist() == [17, 2100, 4400, *[-1] * 17]
    assert found["top_ids"][2].tolist() == list(range(20))


@MODES
def test_scores_depend_on_their_row_alone(mode: Mode) -> None:
    rng = np.random.default_rng(11)
    logits = (rng.standard_normal((5, 2100)) * 5).astype(np.float32)
    case = Case(Score(5), {}, {"logits": logits, "targets": rng.integers(-1, 2100, 5, dtype=np.int32)})
    together = results("score", case, mode)
    for rows in ([4, 2, 0, 1, 3], [2], [1, 1]):
        for name, array in results("score", rows_of(case, rows), mode).items():
            assert array.tobytes() == together[name][rows].tobytes(), name


def test_infinite_logits_have_an_infinite_sum() -> None:
    case = Case(Score(2), {}, {"logits": np.full((2, 9), -np.inf, np.float32), "targets": np.zeros(2, np.int32)})
    case.arrays["logits"][1, 4] = np.inf
    found = results("score", case, FLOAT32)
    assert found["logsumexp"].tolist() == [-np.inf, np.inf]
    assert found["top_ids"].tolist() == [[-1, -1], [4, -1]]
