"""Discovery of ops and their implementations, and selection that says why.

An op is a folder of this package with a ``spec.py``; an implementation is a file ``impl_<backend>.py`` in it. Nothing
else registers anything.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.contract import Arrays, BoundOp, Implementation, OpCall, OpSpec, OpTable

_FOLDER = Path(__file__).parent


@cache
def op_names() -> tuple[str, ...]:
    """Every op, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/spec.py")))


@cache
def spec(op: str) -> OpSpec:
    """The contract of `op`; KeyError, naming the known ops, when there is none."""
    if op not in op_names():
        raise KeyError(f"there is no op {op!r}; the ops are {', '.join(op_names())}")
    found = importlib.import_module(f"pocketllm.kernels.{op}.spec").SPEC
    if found.name != op:
        raise TypeError(f"the contract in kernels/{op}/ calls itself {found.name!r}; folder and name must agree")
    return cast("OpSpec", found)


@cache
def backends_of(op: str) -> tuple[str, ...]:
    """The backends that implement `op` themselves."""
    return tuple(sorted(path.stem.removeprefix("impl_") for path in (_FOLDER / op).glob("impl_*.py")))


@cache
def implementation(op: str, backend: str) -> Implementation:
    """The implementation of `op` for `backend`; importing it may compile nothing and touch no device."""
    return cast("Implementation", importlib.import_module(f"pocketllm.kernels.{op}.impl_{backend}"))


def select(op: str, backend: str, call: OpCall) -> Implementation:
    """The implementation of `op` that serves `call`.

    Raises:
        UnsupportedFeatureError: there is none, or the one there is gives a reason why not.
    """
    have = backends_of(op)
    if backend not in have:
        raise UnsupportedFeatureError(
            f"backend {backend!r} has no kernel for {op!r} (backends that have one: {', '.join(have) or 'none'})"
        )
    found = implementation(op, backend)
    reason = found.supports(call)
    if reason is not None:
        raise UnsupportedFeatureError(f"backend {backend!r} cannot run {op!r} here: {reason}")
    return found


class BackendOpTable(OpTable):
    """The ops of one backend on one device.

    A composite is bound to the backend's own implementation where that serves the call, else it is composed of smaller
    ops of the same backend.
    """

    def __init__(self, backend: str, *, device: str, dtype: str, cache_dtype: str | None = None) -> None:
        self.backend = backend
        self.device = device
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype

    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        """See `OpTable.bind`."""
        contract = spec(op)
        values = _checked_scalars(contract, scalars)
        given = _checked_weights(contract, weights or {})
        call = OpCall(values, given, device=self.device, dtype=self.dtype, cache_dtype=self.cache_dtype)
        if contract.compose is not None and not self._serves(op, call):
            return contract.compose(self, values, given)
        return select(op, self.backend, call).bind(call)

    def _serves(self, op: str, call: OpCall) -> bool:
        return self.backend in backends_of(op) and implementation(op, self.backend).supports(call) is None


class ReferenceOpTable(OpTable):
    """The ops' own references on NumPy arrays: the definition that composites are tested against."""

    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        """See `OpTable.bind`."""
        contract = spec(op)
        values = _checked_scalars(contract, scalars)
        given = _checked_weights(contract, weights or {})
        if contract.compose is not None:
            return contract.compose(self, values, given)
        return self.bind_reference(contract, values, given)

    def bind_reference(self, contract: OpSpec, scalars: Any, weights: Arrays) -> BoundOp:
        """An op that is not a composite, as its reference computes it."""
        return _bound_reference(contract, scalars, weights)


def _bound_reference(contract: OpSpec, scalars: Any, weights: Arrays) -> BoundOp:
    reference = contract.reference
    if reference is None:
        raise TypeError(f"op {contract.name} has no reference")
    names = [operand.name for operand in contract.operands_of("input", "inout")]
    outputs = [operand.name for operand in contract.operands_of("output")]

    def run(*arrays: Any, **named: Any) -> Any:
        given = dict(zip(names, arrays, strict=False)) | named
        wanted = {name: given.pop(name) for name in outputs if name in given}
        result = reference(scalars, **weights, **given)
        if not outputs:
            return None
        results = list(result) if isinstance(result, tuple) else [result]
        for index, name in enumerate(outputs):
            if wanted.get(name) is not None:
                wanted[name][...] = results[index]
                results[index] = wanted[name]
        return tuple(results) if len(results) > 1 else results[0]

    return run


def _checked_scalars(contract: OpSpec, scalars: Mapping[str, Any]) -> Any:
    fields = dataclasses.fields(contract.scalars)
    unknown = sorted(set(scalars) - {field.name for field in fields})
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in scalars]
    if unknown or missing:
        names = ", ".join(field.name for field in fields) or "none"
        raise TypeError(f"op {contract.name}: unknown scalars {unknown}, missing scalars {missing}; it has {names}")
    return contract.scalars(**scalars)


def _checked_weights(contract: OpSpec, weights: Arrays) -> Mapping[str, Any]:
    operands = {operand.name: operand for operand in contract.operands_of("weight")}
    given = {name: value for name, value in weights.items() if value is not None}
    unknown = sorted(set(given) - set(operands))
    missing = sorted(name for name, operand in operands.items() if not operand.optional and name not in given)
    if unknown or missing:
        names = ", ".join(operands) or "none"
        raise TypeError(f"op {contract.name}: unknown weights {unknown}, missing weights {missing}; it has {names}")
    return given
