"""Ops of Gated DeltaNet in CUDA C: bits that depend on a sequence alone, states in place, long keys, no race."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.causal_conv1d import impl_cupy
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check, in_storage, run, scalars_of
from pocketllm.kernels.contract import Case
from pocketllm.kernels.jit.cuda_emulator.settings import Build, emulated
from pocketllm.kernels.registry import spec

Arrays = dict[str, npt.NDArray[Any]]
Step = list[tuple[int, int]]

EMULATED = backend("cupy", "cpu")
MODES = pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
RECURRENCES = pytest.mark.parametrize("op", ["causal_conv1d", "gated_delta_rule"])
BATCH = ("query_start", "state_slot", "save_slot")

ROWS = 2 * impl_cupy.ROWS + 5
"""More than are worked on at a time, in either op."""

SIZES = {"C": 150, "past": 3, "key_heads": 1, "group": 2, "key_dim": 21, "value_dim": 37, "ragged": 1}
"""More channels and columns than one block has."""


def drawn(op: str, seed: int, **sizes: int) -> Case:
    return spec(op).make_case(np.random.default_rng(seed), {"S": 3, "new": ROWS, **SIZES, **sizes})


def results(op: str, case: Case, mode: Mode) -> Arrays:
    return run(spec(op), in_storage(spec(op), case, mode), EMULATED, mode, EMULATED.table(mode), None)


def stepwise(op: str, case: Case, mode: Mode, *steps: Step) -> Arrays:
    """Outputs of all rows of a sequence and the state after each of them.

    A step is a list of pieces of the sequence's inputs. The first ones follow each other and are what is looked at; the
    others stand for sequences that begin there.
    """
    inputs = {name: array for name, array in case.arrays.items() if name not in (*BATCH, "state")}
    rows = max(map(len, inputs.values()))
    state = np.full((rows + 1, *case.arrays["state"].shape[1:]), np.nan, np.float32)
    state[0] = np.random.default_rng(1).standard_normal(state.shape[1:])
    outs = []
    for step in steps:
        (start, stop), *others = step
        lengths = [stop - start for start, stop in step]
        arrays = {name: np.concatenate([array[slice(*piece)] for piece in step]) for name, array in inputs.items()}
        batch = {
            "query_start": np.cumsum([0, *lengths]),
            "state_slot": np.array([start, *[-1] * len(others)]),
            "save_slot": np.array([*range(start + 1, stop + 1), *[-1] * sum(lengths[1:])]),
        }
        arrays |= {"state": state} | {name: array.astype(np.int32) for name, array in batch.items()}
        found = results(op, Case(case.scalars, case.weights, arrays), mode)
        state = found["state"]
        outs.append(found["out"][: stop - start])
    return {"out": np.concatenate(outs), "state": state[1:]}


def assert_same_bits(actual: Arrays, expected: Arrays) -> None:
    assert not np.isnan(expected["state"]).any()
    for name, array in expected.items():
        assert actual[name].tobytes() == array.tobytes(), name


@MODES
@RECURRENCES
@settings(max_examples=12, deadline=None)
@given(
    cuts=st.sets(st.integers(1, ROWS - 1), max_size=4),
    beside=st.lists(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted), max_size=2),
    order=st.integers(0, 3),
)
def test_rows_are_the_same_bits_in_any_chunk_and_beside_any_others(
    op: str, mode: Mode, cuts: set[int], beside: list[list[int]], order: int
) -> None:
    case = drawn(op, 5, S=1, ragged=0)
    others = [(start, stop) for start, stop in beside]
    steps = [[piece, *others] for piece in pairwise([0, *sorted(cuts), ROWS])]
    with emulated(seed=order):
        assert_same_bits(stepwise(op, case, mode, *steps), stepwise(op, case, mode, [(0, ROWS)]))


@MODES
@RECURRENCES
def test_decoding_has_the_bits_of_a_prompt(op: str, mode: Mode) -> None:
    case = drawn(op, 6, S=1, ragged=0)
    row_by_row = stepwise(op, case, mode, *([(row, row + 1)] for row in range(ROWS)))
    assert_same_bits(row_by_row, stepwise(op, case, mode, [(0, ROWS)]))


@RECURRENCES
@pytest.mark.parametrize("row", [0, 1, 2, impl_cupy.ROWS, ROWS - 1])
def test_any_row_is_saved_over_the_state_that_its_sequence_read(op: str, row: int) -> None:
    """Beside a state that its first row leaves, which takes something from the one that was read."""
    case = drawn(op, row, S=2, ragged=0)
    save_slot = np.full(2 * ROWS, -1, np.int32)
    slots = case.arrays["state_slot"] = np.array([1, 0], np.int32)
    case.arrays["state"] = np.random.default_rng(2).standard_normal((4, *case.arrays["state"].shape[1:]), np.float32)
    for sequence, slot in enumerate(slots):
        save_slot[sequence * ROWS] = 2 + sequence
        save_slot[sequence * ROWS + row] = slot
    case.arrays["save_slot"] = save_slot
    with emulated("checked"):
        check(spec(op), case, EMULATED, FLOAT32)


@RECURRENCES
def test_sequences_go_on_from_one_state(op: str) -> None:
    case = drawn(op, 7, S=3, ragged=0)
    rows = len(case.arrays["save_slot"])
    case.arrays["state_slot"] = np.full(3, 1, np.int32)
    case.arrays["save_slot"] = np.where(np.arange(rows) % ROWS == 0, 2 + np.arange(rows) // ROWS, -1).astype(np.int32)
    case.arrays["state"] = np.random.default_rng(3).standard_normal((5, *case.arrays["state"].shape[1:]), np.float32)
    check(spec(op), case, EMULATED, FLOAT32)


@MODES
@pytest.mark.parametrize("key_dim", [1, 16, 100, 128, 256])
def test_keys_of_any_size(key_dim: int, mode: Mode) -> None:
    for seed in range(3):
        check(spec("gated_delta_rule"), drawn("gated_delta_rule", seed, key_dim=key_dim), EMULATED, mode)


def test_keys_that_no_thread_can_hold_are_refused() -> None:
    case = drawn("gated_delta_rule", 0, key_dim=257)
    with pytest.raises(UnsupportedFeatureError, match="keys of 257 numbers are longer than 256"):
        EMULATED.table(FLOAT32).bind("gated_delta_rule", case.weights, **scalars_of(case))


@MODES
@pytest.mark.parametrize("taps", [2, 7])
def test_convolutions_of_any_length(taps: int, mode: Mode) -> None:
    for seed in range(4):
        check(spec("causal_conv1d"), drawn("causal_conv1d", seed, past=taps - 1), EMULATED, mode)


@MODES
def test_rows_of_the_gated_norm_stand_alone(mode: Mode) -> None:
    case = spec("gated_rms_norm").make_case(np.random.default_rng(0), {"rows": 7, "heads": 3, "n": 130})
    together = results("gated_rms_norm", case, mode)["out"]
    for row in range(7):
        alone = Case(case.scalars, case.weights, {name: array[row : row + 1] for name, array in case.arrays.items()})
        assert results("gated_rms_norm", alone, mode)["out"].tobytes() == together[row].tobytes()


@MODES
@pytest.mark.parametrize("op", ["causal_conv1d", "gated_delta_rule", "gated_rms_norm", "sigmoid_gate"])
@pytest.mark.parametrize(("build", "order"), [("checked", 0), ("checked", 3), ("plain", 1)])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_rule_is_broken_in_any_order(op: str, mode: Mode, build: Build, order: int, seed: int) -> None:
    contract, rng = spec(op), np.random.default_rng(seed)
    dims = {name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()}
    if "new" in dims:
        dims["new"] = ROWS
    with emulated(build, order):
        check(contract, contract.make_case(rng, dims), EMULATED, mode)
