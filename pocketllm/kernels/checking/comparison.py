"""Runs an op as its contract defines it and as a backend computes it, and compares.

The tolerance of an op is its contract's error bound. A composite has none of its own; its tolerance follows from the
bounds of its parts. To first order its error is the sum of its parts' errors, each carried through the rest of the
composition. So the composition is rerun in float64 with every number that a part computes moved by its bound times a
normal random number. The root mean square of what that does to a result over a few reruns estimates the standard
deviation of an error made of independent errors as large as the bounds allow; four of these are the tolerance. Moves by
the whole bound, up or down, would cancel in all reruns now and then, where a result depends on two numbers alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.errors import PocketLLMError, UnsupportedFeatureError
from pocketllm.kernels import bfloat16
from pocketllm.kernels.checking.arrays import Backend, Mode
from pocketllm.kernels.contract import UNIT_ROUNDOFF, Arrays, BoundOp, Case, OpSpec, OpTable
from pocketllm.kernels.registry import ReferenceOpTable

Array = npt.NDArray[Any]

RERUNS = 10
DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where an implementation departs from its contract.

    Attributes:
        op: the op.
        scalars: what it was bound with.
        sizes: of the contract's dimensions.
        operand: where it shows; None when the op did not get so far.
        index: of the first number that is off; None when the complaint is not about a number.
        actual, expected, bound: that number, what it should be, and by how much it may differ.
    """

    op: str
    scalars: Any
    sizes: dict[str, int]
    operand: str | None = None
    index: tuple[int, ...] | None = None
    actual: float | None = None
    expected: float | None = None
    bound: float | None = None

    def error(self, complaint: str) -> KernelMismatchError:
        """The error that says so."""
        where = self.op if self.operand is None else f"{self.op}: {self.operand}"
        return KernelMismatchError(f"{where} {complaint}, under {self.scalars} with sizes {self.sizes}", self)


class KernelMismatchError(PocketLLMError):
    """An implementation does not do what its op's contract says.

    Attributes:
        mismatch: where.
    """

    def __init__(self, message: str, mismatch: Mismatch) -> None:
        super().__init__(message)
        self.mismatch = mismatch


def mismatch(contract: OpSpec, case: Case, operand: str | None = None, **number: Any) -> Mismatch:
    """A departure from the contract on this case; `number` has the attributes of one that is off."""
    sizes = contract.sizes({**case.weights, **case.arrays})
    return Mismatch(contract.name, case.scalars, sizes, operand, **number)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well an implementation agrees with its contract on one case.

    Attributes:
        error: the largest error as a share of its bound, 0 to 1; 0 where everything is exact.
        near_ties: rows of decisions that came down on the other side of a near tie.
    """

    error: float = 0.0
    near_ties: int = 0


def check(
    contract: OpSpec, case: Case, backend: Backend, mode: Mode, *, table: OpTable | None = None, give_out: bool = True
) -> Agreement:
    """See that the backend's op agrees with the contract on this case, and leaves alone what it may only read.

    Args:
        contract: the op.
        case: what it is bound to and called with.
        backend: where it runs.
        mode: the dtypes that it runs in.
        table: replaces the backend's own ops.
        give_out: whether the op is given arrays, full of NaN, to write to.

    Raises:
        KernelMismatchError: it does not.
        UnsupportedFeatureError: the implementation refuses the case.
    """
    case = in_storage(contract, case, mode)
    expected, bounds = expectation(contract, case, mode)
    calls = called_twice(contract, case, backend, mode, table or backend.table(mode), expected if give_out else None)
    first = _agreement(contract, case, next(calls), expected, bounds)
    try:
        (second,) = (_agreement(contract, case, actual, expected, bounds) for actual in calls)
    except KernelMismatchError as error:
        raise KernelMismatchError(f"{error}, when it is called a second time", error.mismatch) from error
    return Agreement(max(first.error, second.error), max(first.near_ties, second.near_ties))


def _agreement(
    contract: OpSpec, case: Case, actual: dict[str, Array], expected: dict[str, Array], bounds: dict[str, Array]
) -> Agreement:
    if contract.choices is not None:
        return Agreement(
            near_ties=sum(compare_choices(contract, case, actual[name], expected[name]) for name in expected)
        )
    errors = (compare(contract, case, name, actual[name], want, bounds.get(name)) for name, want in expected.items())
    return Agreement(error=max(errors, default=0.0))


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
        return bfloat16.from_bits(bfloat16.to_bits(array))
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
    """What `OpTable.bind` takes as keywords."""
    return {field.name: getattr(case.scalars, field.name) for field in dataclasses.fields(case.scalars)}


def in_float64(case: Case) -> Case:
    """The case with float64 numbers, on which references round nowhere."""
    weights, arrays = (
        {name: array.astype(np.float64) if plain(array).dtype.kind == "f" else array for name, array in part.items()}
        for part in (case.weights, case.arrays)
    )
    return Case(case.scalars, weights, arrays)


def composite_tolerance(contract: OpSpec, case: Case, results: dict[str, Array], u: float) -> dict[str, Array]:
    """What the module's text derives, by result; the storage of the result adds its rounding."""
    squares = {name: np.zeros(array.shape) for name, array in results.items()}
    for seed in range(RERUNS):
        moved = reference_results(contract, case, MovedOps(np.random.default_rng(seed), u))
        for name, array in moved.items():
            squares[name] += (array - results[name]) ** 2
    return {
        name: DEVIATIONS * np.sqrt(square / RERUNS) + 2 * u * np.abs(results[name]) for name, square in squares.items()
    }


class MovedOps(ReferenceOpTable):
    """References whose results are off at random, by as much as the bound of their error in the root mean square."""

    def __init__(self, rng: np.random.Generator, u: float) -> None:
        self.rng = rng
        self.u = u

    def bind_reference(self, contract: OpSpec, scalars: Any, weights: Arrays) -> BoundOp:
        """See `ReferenceOpTable.bind_reference`."""
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
                target += bound * self.rng.standard_normal(bound.shape)
            return result

        return moved


def run(
    contract: OpSpec, case: Case, backend: Backend, mode: Mode, table: OpTable, outputs: Arrays | None
) -> dict[str, Array]:
    """Each output and inout as the backend computes it in one call; see `called_twice`."""
    return next(called_twice(contract, case, backend, mode, table, outputs))


def called_twice(
    contract: OpSpec, case: Case, backend: Backend, mode: Mode, table: OpTable, outputs: Arrays | None
) -> Iterator[dict[str, Array]]:
    """Each output and inout as the backend computes it in one call of a bound op, then in another on equal arrays.

    Where `outputs` is given the op writes to arrays of those shapes, and has to return them. Before the second call
    all that the first was given and gave is overwritten: an op that looks back at it computes something else, and one
    that writes there, or hands out memory of its own once more, is found out.

    Raises:
        KernelMismatchError: the op cannot be bound or raises, something that is only read has changed, it returns
            other arrays than it was given or none of the backend's, or it reaches for what an earlier call had.
        UnsupportedFeatureError: the implementation refuses to be bound.
    """
    operands = {operand.name: operand for operand in contract.operands}
    weights = {name: backend.put(array, mode.dtype_of(operands[name])) for name, array in case.weights.items()}
    bound = _bound(contract, case, table, weights)
    first, second = (_Call(contract, case, backend, mode, outputs) for _ in range(2))
    yield first.run(bound, weights)
    first.overwrite()
    yield second.run(bound, weights)
    first.check_overwritten()


def _bound(contract: OpSpec, case: Case, table: OpTable, weights: Arrays) -> BoundOp:
    try:
        return table.bind(contract.name, weights, **scalars_of(case))
    except UnsupportedFeatureError:
        raise
    except (Exception, SystemExit) as error:
        raise mismatch(contract, case).error(f"cannot be bound: {described(error)}") from error


def described(error: BaseException) -> str:
    """What is said of an error: its type too, where PocketLLM did not raise it on purpose."""
    return str(error) if isinstance(error, PocketLLMError) else f"{type(error).__name__}: {error}"


class _Call:
    """One call of a bound op: arrays of its own, equal to the case's, and what it gave."""

    def __init__(self, contract: OpSpec, case: Case, backend: Backend, mode: Mode, outputs: Arrays | None) -> None:
        self._contract, self._case, self._backend = contract, case, backend
        self._operands = {operand.name: operand for operand in contract.operands}
        self._dtypes = {name: mode.dtype_of(operand) for name, operand in self._operands.items()}
        self._arrays = {
            name: read_only(array) if self._operands[name].host else backend.put(array, self._dtypes[name])
            for name, array in case.arrays.items()
        }
        self._outputs = {
            operand.name: backend.put(poisoned(outputs[operand.name]), self._dtypes[operand.name])
            for operand in contract.operands_of("output")
            if outputs is not None
        }

    def run(self, bound: BoundOp, weights: Arrays) -> dict[str, Array]:
        """Each output and inout, as NumPy's."""
        try:
            returned = bound(**self._arrays, **self._outputs)
        except (Exception, SystemExit) as error:
            # A refusal too: what an op cannot serve it has to say before it is bound.
            raise self._error(None, f"ends with {type(error).__name__}: {error}") from error
        self._outputs = self._returned(returned)
        results = {name: self._backend.get(array) for name, array in self._outputs.items()}
        before = {**self._case.weights, **self._case.arrays}
        for name, array in {**weights, **self._arrays}.items():
            after = self._now(name, array)
            if self._operands[name].role == "inout":
                results[name] = after
            elif not _same(plain(before[name]), plain(after)):
                raise self._error(name, "was written to, and may only be read")
        return results

    def overwrite(self) -> None:
        """Fill all arrays with what the op was neither given nor should give."""
        for name, array in {**self._arrays, **self._outputs}.items():
            blank = _blank(self._now(name, array))
            if self._operands[name].host:
                array.flags.writeable = True
                array[...] = blank
                array.flags.writeable = False
                continue
            try:
                array[...] = self._backend.put(blank, self._dtypes[name])
            except (RuntimeError, ValueError) as error:
                complaint = f"is an array that its caller cannot write to ({error})"
                raise self._error(name, complaint) from error

    def check_overwritten(self) -> None:
        """KernelMismatchError where that is no longer there."""
        for name, array in {**self._arrays, **self._outputs}.items():
            now = self._now(name, array)
            if not _same(_blank(now), now):
                raise self._error(name, "of an earlier call was written to by a later one")

    def _returned(self, result: Any) -> dict[str, Any]:
        """The arrays that the op returned, by output."""
        outputs = self._contract.operands_of("output")
        returned = result if isinstance(result, tuple) else (result,) if outputs else ()
        if len(returned) != len(outputs):
            raise self._error(None, f"returns {len(returned)} arrays and not {len(outputs)}")
        arrays = {operand.name: array for operand, array in zip(outputs, returned, strict=True)}
        for name, array in arrays.items():
            if self._outputs and array is not self._outputs[name]:
                raise self._error(name, "is another array than the one that it was to be written to")
            kind, wanted = _kind(array), _kind(self._backend.put(np.zeros(0, np.float32), self._dtypes[name]))
            if kind != wanted:
                raise self._error(name, f"is {kind}, not {wanted}")
        return arrays

    def _now(self, name: str, array: Any) -> Any:
        return array if self._operands[name].host else self._backend.get(array)

    def _error(self, operand: str | None, complaint: str) -> KernelMismatchError:
        return mismatch(self._contract, self._case, operand).error(complaint)


def _kind(array: Any) -> str:
    """Type and dtype of an array, of whichever library."""
    dtype = getattr(array, "dtype", None)
    return (
        type(array).__qualname__ if dtype is None else f"{type(array).__module__}.{type(array).__qualname__} of {dtype}"
    )


def _same(before: Array, after: Array) -> bool:
    return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")


def _blank(array: Array) -> Array:
    """An array like this one, of NaN; of 0 where there is none, for such numbers may be indices."""
    return np.full_like(array, np.nan if array.dtype.kind == "f" else 0)


def read_only(array: Array) -> Array:
    """A copy that cannot be written to."""
    array = array.copy()
    array.flags.writeable = False
    return array


def poisoned(array: Array) -> Array:
    """An array like this one that holds what no op computes."""
    return np.full_like(array, np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max)


def compare(contract: OpSpec, case: Case, name: str, actual: Array, expected: Array, bound: Array | None) -> float:
    """The largest error of an output as a share of its bound.

    Raises:
        KernelMismatchError: `actual` is not within `bound` of `expected`, or not equal to it where there is no bound.
        ValueError: the contract gives no usable bound.
    """
    if actual.shape != expected.shape:
        raise mismatch(contract, case, name).error(f"has shape {list(actual.shape)}, not {list(expected.shape)}")
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    limit = np.zeros(expected.shape) if bound is None else bound
    if limit.shape != expected.shape or np.isnan(limit[~np.isnan(expected)]).any():
        raise ValueError(f"{contract.name}: the contract's bound for {name} has another shape or holds NaN")
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
        wrong = ~same & ~(error <= limit)
    if wrong.any():
        at = tuple(int(index[0]) for index in np.nonzero(wrong))
        number = {"actual": float(actual[at]), "expected": float(expected[at]), "bound": float(limit[at])}
        raise mismatch(contract, case, name, index=at, **number).error(
            f"is off in {wrong.sum()} of {wrong.size} numbers: at {list(at)} it is {number['actual']!r}, not "
            f"{number['expected']!r} within {number['bound']:.3g}"
        )
    return float(np.max(error[~same] / limit[~same], initial=0.0))


def compare_choices(contract: OpSpec, case: Case, actual: Array, expected: Array) -> int:
    """How many rows' decisions are not the reference's.

    Raises:
        KernelMismatchError: a row's decision is none that the contract allows.
    """
    if contract.choices is None:
        raise TypeError(f"op {contract.name} decides nothing")
    (output,) = contract.operands_of("output")
    if actual.shape != expected.shape:
        raise mismatch(contract, case, output.name).error(f"has shape {list(actual.shape)}, not {list(expected.shape)}")
    differ = np.flatnonzero(actual != expected)
    choices = contract.choices(case) if len(differ) else []
    for row in differ:
        if int(actual[row]) not in choices[row]:
            inputs = {name: array[row] for name, array in case.arrays.items() if array.shape == expected.shape}
            number = {"actual": float(actual[row]), "expected": float(expected[row]), "bound": 0.0}
            raise mismatch(contract, case, output.name, index=(int(row),), **number).error(
                f"is wrong in row {row}: it is {actual[row]}, and may be {sorted(choices[row])} with {inputs}"
            )
    return len(differ)
