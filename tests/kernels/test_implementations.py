"""Every implementation of every op against its contract; new ones are found by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import FLOAT32, Backend, Mode, backend, backend_names
from pocketllm.kernels.checking.cases import check_cases, corners, drawn_cases, whole_sizes, wide_sizes
from pocketllm.kernels.checking.comparison import (
    check,
    compare,
    expectation,
    in_storage,
    scalars_of,
)
from pocketllm.kernels.registry import backends_of, op_names, spec
from tests.kernels.discovery import implementations, sizes

EVERY = pytest.mark.parametrize(
    ("op", "backend", "mode"),
    [pytest.param(*found, id=f"{found[0]}-{found[1].name}-{found[2]}") for found in implementations()],
)


@EVERY
@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), give_out=st.booleans())
def test_agrees_with_the_contract(
    op: str, backend: Backend, mode: Mode, data: st.DataObject, seed: int, give_out: bool
) -> None:
    contract = spec(op)
    case = contract.make_case(np.random.default_rng(seed), data.draw(sizes(contract), label="sizes"))
    try:
        if check(contract, case, backend, mode, give_out=give_out).near_ties:
            event(f"{op}: a near tie was decided the other way")
    except UnsupportedFeatureError:
        assume(False)


@EVERY
@pytest.mark.parametrize("corner", range(3), ids=["least", "least but one row", "most"])
def test_agrees_at_the_ends_of_the_sizes(op: str, backend: Backend, mode: Mode, corner: int) -> None:
    contract = spec(op)
    dims = corners(contract)[corner]
    try:
        for seed in range(3):
            check(contract, contract.make_case(np.random.default_rng(seed), dims), backend, mode)
    except UnsupportedFeatureError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize(
    ("op", "backend", "mode"),
    [
        pytest.param(op, found, mode, id=f"{op}-{found.name}-{mode}")
        for op, found, mode in implementations()
        if wide_sizes(spec(op), emulated=found.emulator is not None)
    ],
)
def test_agrees_at_the_sizes_of_models(op: str, backend: Backend, mode: Mode) -> None:
    """Threads, tiles and tails come in there that the property tests' small cases never reach."""
    contract, emulated = spec(op), backend.emulator is not None
    first = len(corners(contract))
    count = len(wide_sizes(contract, emulated=emulated)) + len(whole_sizes(contract, emulated=emulated))
    report = check_cases(op, backend, mode, drawn_cases(contract, 0, range(first, first + count), emulated=emulated))
    assert report.failure is None, str(report.failure.error)
    assert report.agreed + report.refused == count


def test_every_backend_is_tested() -> None:
    found = {name for op in op_names() for name in backends_of(op)}
    assert found == set(backend_names()), "kernels/checking/ needs an adapter for each backend that has a kernel"


def test_torch_attention_takes_host_arrays_of_the_step() -> None:
    contract, torch = spec("paged_attention"), backend("torch")
    dims = {name: high for name, (_, high) in contract.dims.items()}
    for seed in range(10):
        case = contract.make_case(np.random.default_rng(seed), dims)
        case = in_storage(contract, case, FLOAT32)
        expected, bounds = expectation(contract, case, FLOAT32)
        weights = _put(torch, case.weights)
        attention = torch.table(FLOAT32).bind("paged_attention", weights, **scalars_of(case))
        step = {name: case.arrays[name] for name in ("query_start", "context_len", "block_table")}
        numbers = {name: array for name, array in case.arrays.items() if name not in step}
        out = torch.get(attention(**_put(torch, numbers), **step))
        compare(contract, case, "out", out, expected["out"], bounds["out"])


def _put(backend: Backend, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    return {name: backend.put(array, str(array.dtype)) for name, array in arrays.items()}
