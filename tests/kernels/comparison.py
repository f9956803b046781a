"""Runs an op as its contract defines it and as a backend computes it, and compares.

The tolerance of an op is its contract's error bound. A composite has none of its own; its tolerance follows from the
bounds of its parts. To first order its error is the sum of its parts' errors, each carried through the rest of the
composition. So the composition is rerun in float64 with every number that a part computes moved up or down, at random,
by its whole bound. The root mean square of what that does to a result over a few reruns estimates the standard
deviation of an error made of independent errors as large as the bounds allow; four of these are the tolerance.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import UNIT_ROUNDOFF, Arrays, BoundOp, Case, OpSpec, OpTable
from pocketllm.kernels.registry import ReferenceOpTable
from tests.kernels.backends import Backend, Mode

Array = npt.NDArray[Any]

RERUNS = 6
DEVIATIONS = 4.0


def check(
    contract: OpSpec, case: Case, backend: Backend, mode: Mode, *, table: OpTable | None = None, give_out: bool = True
) -> int:
    """Fails unless the backend's op agrees with the contract on this case, and leaves alone what it may only read.

    `table` replaces the backend's own ops. With `give_out` the op is given arrays full of NaN to write to. Returns how
    many rows came down on the other side of a near tie, for the caller to record.
    """
    case = in_storage(contract, case, mode)
    expected, bounds = expectation(contract, case, mode)
    actual = run(contract, case, backend, mode, table or backend.table(mode), expected if give_out else None)
    near_ties = 0
    for name, want in expected.items():
        if contract.choices is not None:
            near_ties += compare_choices(contract, case, actual[name], want)
        else:
            compare(contract, case, name, actual[name], want, bounds.get(name))
    return near_ties


def in_storage(contract: OpSpec, case: Case, mode: Mode) -> Case:
    """The case with every number as the backend's dtypes can hold it."""
    dtypes = {operand.name: mode.dtype_of(operand) for operand in contract.operands}
    weights, arrays = (
        {name: rounded(array, dtypes[name]) for name, array in part.items()} for part in (case.weights, case.arrays)
    )
    return Case(case.scalars, weights, arrays)


def rounded(array: Array, dtype: str) -> Array:
    """A copy rounded to `dtype`, half to even; 16-bit formats stay in float32, quantised tensors as they are."""
    if isinstance(array, QuantTensor):
        return array
    if dtype == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
        return np.where(np.isnan(array), array, bits.astype(np.uint32).view(np.float32)).astype(np.float32)
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    return array.astype(dtype)


def plain(array: Array | QuantTensor) -> Array:
    """The array itself, or a quantised tensor's bytes."""
    return array.data if isinstance(array, QuantTensor) else array


def expectation(contract: OpSpec, case: Case, mode: Mode) -> tuple[dict[str, Array], dict[str, Array]]:
    """What each output and inout should be, in storage, and by how much it may differ."""
    u = UNIT_ROUNDOFF[mode.dtype]
    if contract.compose is None:
        results = reference_results(contract, case, ReferenceOpTable())
        bounds = {} if contract.error_bound is None else contract.error_bound(case, u)
    else:
        case = in_float64(case)
        results = reference_results(contract, case, ReferenceOpTable())
        bounds = composite_tolerance(contract, case, results, u)
    dtypes = {operand.name: mode.dtype_of(operand) for operand in contract.operands}
    return {name: rounded(array, dtypes[name]) for name, array in results.items()}, bounds


def reference_results(contract: OpSpec, case: Case, table: OpTable) -> dict[str, Array]:
    """Each output and inout that the case gets from the ops of `table`, which take NumPy arrays."""
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    result = table.bind(contract.name, case.weights, **scalars_of(case))(**arrays)
    outputs = [operand.name for operand in contract.operands_of("output")]
    results = result if isinstance(result, tuple) else (result,)
    inouts = {operand.name: arrays[operand.name] for operand in contract.operands_of("inout") if operand.name in arrays}
    return dict(zip(outputs, results, strict=False)) | inouts


def scalars_of(case: Case) -> dict[str, Any]:
    return {field.name: getattr(case.scalars, field.name) for field in dataclasses.fields(case.scalars)}


def in_float64(case: Case) -> Case:
    """The case with float64 numbers, on which references round nowhere."""
    weights, arrays = (
        {name: array.astype(np.float64) if plain(array).dtype.kind == "f" else array for name, array in part.items()}
        for part in (case.weights, case.arrays)
    )
    return Case(case.scalars, weights, arrays)


def composite_tolerance(contract: OpSpec, case: Case, results: dict[str, Array], u: float) -> dict[str, Array]:
    """See the module's text; the storage of the result adds its rounding."""
    squares = {name: np.zeros(array.shape) for name, array in results.items()}
    for seed in range(RERUNS):
        moved = reference_results(contract, case, MovedOps(np.random.default_rng(seed), u))
        for name, array in moved.items():
            squares[name] += (array - results[name]) ** 2
    return {
        name: DEVIATIONS * np.sqrt(square / RERUNS) + 2 * u * np.abs(results[name]) for name, square in squares.items()
    }


class MovedOps(ReferenceOpTable):
    """References whose results are off, up or down at random, by the whole bound of their error."""

    def __init__(self, rng: np.random.Generator, u: float) -> None:
        self.rng = rng
        self.u = u

    def bind_reference(self, contract: OpSpec, scalars: Any, weights: Arrays) -> BoundOp:
        reference = super().bind_reference(contract, scalars, weights)
        error_bound = contract.error_bound
        if error_bound is None:
            return reference
        names = [operand.name for operand in contract.operands_of("input", "inout")]

        def moved(*arrays: Any, **named: Any) -> Any:
            given = dict(zip(names, arrays, strict=False)) | named
            given = {name: array for name, array in given.items() if array is not None}
            copies = {name: array.copy() for name, array in given.items()}
            bounds = error_bound(Case(scalars, dict(weights), copies), self.u)
            result = reference(**given)
            for name, bound in bounds.items():
                target = given.get(name, result)
                target += bound * self.rng.choice([-1.0, 1.0], size=bound.shape)
            return result

        return moved


def run(
    contract: OpSpec, case: Case, backend: Backend, mode: Mode, table: OpTable, outputs: dict[str, Array] | None
) -> dict[str, Array]:
    """Each output and inout as the backend computes it; fails where something that is only read has changed.

    Where `outputs` is given the op writes to arrays of those shapes, and has to return them.
    """
    operands = {operand.name: operand for operand in contract.operands}
    weights = {name: backend.put(array, mode.dtype_of(operands[name])) for name, array in case.weights.items()}
    arrays = {
        name: read_only(array) if operands[name].host else backend.put(array, mode.dtype_of(operands[name]))
        for name, array in case.arrays.items()
    }
    buffers = {}
    for operand in contract.operands_of("output") if outputs is not None else ():
        poison = poisoned(outputs[operand.name])
        buffers[operand.name] = backend.put(poison, mode.dtype_of(operand))
    result = table.bind(contract.name, weights, **scalars_of(case))(**arrays, **buffers)
    returned = result if isinstance(result, tuple) else (result,) if contract.operands_of("output") else ()
    results = {}
    for operand, array in zip(contract.operands_of("output"), returned, strict=True):
        buffer = buffers.get(operand.name, array)
        assert array is buffer, f"{contract.name}: returned another array than the one it was given for {operand.name}"
        results[operand.name] = backend.get(array)
    for name, array in {**weights, **arrays}.items():
        after = array if operands[name].host else backend.get(array)
        if operands[name].role == "inout":
            results[name] = after
        else:
            before, after = plain({**case.weights, **case.arrays}[name]), plain(after)
            assert np.array_equal(before, after, equal_nan=before.dtype.kind == "f"), f"{contract.name} wrote to {name}"
    return results


def read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


def poisoned(array: Array) -> Array:
    """An array like this one that holds what no op computes."""
    return np.full_like(array, np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)


def compare(contract: OpSpec, case: Case, name: str, actual: Array, expected: Array, bound: Array | None) -> None:
    """Fails unless `actual` is within `bound` of `expected`, or equal to it where there is no bound."""
    __tracebackhide__ = True
    where = f"{contract.name}: {name} under {case.scalars} with sizes {contract.sizes({**case.weights, **case.arrays})}"
    assert actual.shape == expected.shape, f"{where} has shape {actual.shape}, not {expected.shape}"
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    limit = np.zeros(expected.shape) if bound is None else bound
    assert limit.shape == expected.shape, f"{where}: the bound has shape {limit.shape}, not {expected.shape}"
    assert not np.isnan(limit[~np.isnan(expected)]).any(), f"{where}: the bound holds NaN"
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        wrong = ~same & ~(np.abs(actual - expected) <= limit)
    if wrong.any():
        at = tuple(int(index[0]) for index in np.nonzero(wrong))
        raise AssertionError(
            f"{where}: {wrong.sum()} of {wrong.size} numbers are off; at {list(at)} it is {actual[at]!r}, not "
            f"{expected[at]!r} within {limit[at]:.3g}"
        )


def compare_choices(contract: OpSpec, case: Case, actual: Array, expected: Array) -> int:
    """Fails where a row's decision is none that the contract allows; returns how many are not the reference's."""
    __tracebackhide__ = True
    assert contract.choices is not None
    differ = np.flatnonzero(actual != expected)
    for row in differ:
        choices = contract.choices(case)[row]
        numbers = {name: array[row] for name, array in case.arrays.items() if array.shape == expected.shape}
        assert int(actual[row]) in choices, (
            f"{contract.name}: row {row} is {actual[row]}, not {expected[row]} (choices {set(choices)}) with {numbers}"
        )
    return len(differ)
