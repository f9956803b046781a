"""What an operation is, apart from any implementation of it.

Each folder beside this file holds one op: ``spec.py`` states its contract (an `OpSpec` called ``SPEC``), every
``impl_<backend>.py`` implements it. Property tests, kernel benchmarks and the documentation's tables come from the
contract alone, so adding an implementation touches one folder, and adding an op that and the tests that judge its
contract.

An op lives in two phases. *Binding* happens once, while a model is loaded: it fixes the scalars and the weights and
selects an implementation. *Calling* happens in every step, with arrays only.

Models import this module and nothing else from the kernels: they bind ops by name through an `OpTable`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = Any
"""An array of whichever library the runtime uses: NumPy, PyTorch or CuPy."""

Role = Literal["input", "weight", "inout", "output"]
Dims = Mapping[str, int]
Arrays = Mapping[str, Array]

UNIT_ROUNDOFF: Mapping[str, float] = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding a number to that dtype."""

ACCUMULATION_ROUNDOFF = UNIT_ROUNDOFF["float32"]
"""Sums, statistics and elementary functions are computed in float32 or better, whatever the activation dtype; only
what is stored is rounded to the activation dtype. Every error bound is derived from this."""

Dim = str | int


@dataclass(frozen=True, slots=True)
class Operand:
    """One array that an op reads or writes.

    Attributes:
        name: keyword by which it is passed: to `bind` when its role is ``weight``, else to the call.
        dims: its shape in named dimensions or fixed sizes, such as ``("T", "heads", 2)``; () is a scalar array.
            ``"S+1"`` is one more than ``S``; any other text, such as ``"heads*D"``, is a name of its own. A leading
            ``"..."`` stands for any number of dimensions, the same ones in every operand that has it.
        dtype: a NumPy dtype name, or ``activation``: float32 or bfloat16 as the runtime computes; ``cache``: as the
            runtime keeps keys and values; ``weight``: any format of a checkpoint, as the runtime prepared it (the
            reference takes floating-point numbers).
        role: ``input`` is only read, ``inout`` is updated in place, ``output`` is returned (and written to the
            array that the caller passes as keyword `name`, when one is passed), ``weight`` is fixed by `bind`.
        optional: may be left out (None).
        host: always a NumPy array, for it is made anew on the host in every step; an implementation moves it to
            where it computes.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: str = "activation"
    role: Role = "input"
    optional: bool = False
    host: bool = False


class BoundOp(Protocol):
    """An op with scalars and weights fixed.

    It is called with its inputs and inouts as keywords or in the contract's order, and with arrays to write its outputs
    to as keywords. It returns its output, which is the array it was given where one was given (a tuple when there are
    several, None when there is none).

    Arrays are contiguous, slowest dimension first. An array to write to overlaps no other one.
    """

    def __call__(self, *arrays: Array, **named: Array) -> Any:
        """Runs the op."""


class OpTable(ABC):
    """Binds ops by name; what a model sees of a backend."""

    @abstractmethod
    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        """The best implementation of `op` for these scalars and weights.

        Raises:
            UnsupportedFeatureError: no implementation of this backend can serve them; the message gives each one's
                reason.
            TypeError: `scalars` are not those of the op's contract, or `weights` lacks an operand.
        """


@dataclass(frozen=True, slots=True)
class NoScalars:
    """The scalars of an op that has none."""


Reference = Callable[..., Any]
"""Called as ``reference(scalars, **arrays)`` on NumPy arrays. It computes in float64 and rounds once, at the end, to
the dtype of its inputs, so it is the truth that every implementation's rounding error is measured from (and on float64
arrays it rounds nowhere). Outputs are returned; inout arrays are updated in place."""

Compose = Callable[[OpTable, Any, Arrays], BoundOp]
"""``compose(ops, scalars, weights)``: the op built from smaller ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test case of an op: what to bind and what to call it with (NumPy arrays)."""

    scalars: Any
    weights: dict[str, npt.NDArray[Any]]
    arrays: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A size at which the op is timed.

    Attributes:
        dims: the sizes, as the case maker takes them.
        nbytes: bytes that must move at least once.
        operations: arithmetic operations that must be done (a multiply-add counts as two).
    """

    dims: dict[str, int]
    nbytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The contract of an op.

    Attributes:
        name: the folder's name.
        summary: one sentence for the documentation's table.
        scalars: a frozen dataclass with every number that is fixed by `bind`.
        operands: every array, in calling order.
        reference: the slow, obvious definition; None for a composite, whose definition is its composition.
        make_case: ``make_case(rng, dims)`` builds a random valid case of those sizes. It may draw scalars too.
        dims: the sizes tests draw from: name -> (least, most), both included.
        error_bound: ``error_bound(case, u)``: for each output and inout, by name, an array that bounds the absolute
            error of a correct implementation whose activations have unit round-off `u`, the rounding of the reference
            included. Derived from the standard model of floating-point arithmetic with `ACCUMULATION_ROUNDOFF`, not
            tuned. A result without a bound is exact. None for composites and for ops all of whose results are exact.
        choices: ``choices(case)``, for ops whose one output is a decision per row: for each row every decision that a
            correct implementation can come to. More than one only where rounding may tip the balance.
        bench: sizes at which it is timed.
        compose: how to build the op from smaller ones where a backend has no implementation of its own.
    """

    name: str
    summary: str
    scalars: type
    operands: tuple[Operand, ...]
    make_case: Callable[[np.random.Generator, Dims], Case]
    dims: Mapping[str, tuple[int, int]]
    reference: Reference | None = None
    error_bound: Callable[[Case, float], dict[str, npt.NDArray[np.float64]]] | None = None
    choices: Callable[[Case], list[frozenset[int]]] | None = None
    bench: tuple[BenchShape, ...] = field(default=())
    compose: Compose | None = None

    def __post_init__(self) -> None:
        if (self.reference is None) == (self.compose is None):
            raise TypeError(f"op {self.name}: give a reference or a composition, exactly one of them")

    def operands_of(self, *roles: Role) -> tuple[Operand, ...]:
        """The operands with one of these roles, in calling order."""
        return tuple(operand for operand in self.operands if operand.role in roles)

    def sizes(self, arrays: Arrays) -> dict[str, int]:
        """The size of each named dimension, read off the shapes of the operands among `arrays`.

        Raises:
            ValueError: an array's shape does not follow the contract, or disagrees with another array's.
        """
        found: dict[str, int] = {}
        leading: tuple[int, ...] | None = None
        for operand in self.operands:
            array = arrays.get(operand.name)
            if array is None:
                continue
            shape, dims = tuple(array.shape), operand.dims
            if dims[:1] == ("...",):
                dims = dims[1:]
                split = len(shape) - len(dims)
                if leading is not None and shape[:split] != leading:
                    raise ValueError(f"{self.name}: {operand.name} is {list(shape)}; leading sizes are {leading}")
                leading, shape = shape[:split], shape[split:]
            if len(shape) != len(dims):
                raise ValueError(f"{self.name}: {operand.name} is {list(array.shape)}, not {list(operand.dims)}")
            for dim, size in zip(dims, shape, strict=True):
                _fix(found, dim, size, f"{self.name}: {operand.name} is {list(array.shape)}, not {list(operand.dims)}")
        return found


def _fix(sizes: dict[str, int], dim: Dim, size: int, complaint: str) -> None:
    """Notes that `dim` is of this size; ValueError where it is known to be of another one."""
    if isinstance(dim, int):
        if size != dim:
            raise ValueError(complaint)
        return
    name, _, more = dim.partition("+")
    if sizes.setdefault(name, size - int(more or 0)) != size - int(more or 0):
        raise ValueError(f"{complaint} with {name} = {sizes[name]}")


@dataclass(frozen=True, slots=True)
class OpCall:
    """What an implementation judges when it is asked whether it can serve.

    Attributes:
        scalars: an instance of the contract's scalars.
        weights: prepared weights by operand name (optional ones may be missing).
        device: such as ``cpu`` or ``cuda:0``.
        dtype: the activation dtype, ``float32`` or ``bfloat16``.
        cache_dtype: the dtype of the key and value cache, ``float32``, ``float16`` or ``bfloat16``.
    """

    scalars: Any
    weights: Arrays
    device: str
    dtype: str
    cache_dtype: str


class Implementation(Protocol):
    """The module ``impl_<backend>.py`` of an op."""

    def supports(self, call: OpCall) -> str | None:
        """None, or the reason why this implementation cannot serve the call."""

    def bind(self, call: OpCall) -> BoundOp:
        """The op with scalars and weights fixed; arrays given to it are the backend's own."""
