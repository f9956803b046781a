"""Discovery of ops and their implementations, and selection that says why.

An op is a folder of this package with a ``spec.py``; an implementation is a file ``impl_<backend>.py`` in it. Nothing
else registers anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.contract import Arrays, BoundOp, Implementation, OpCall, OpSpec, OpTable
from pocketllm.kernels.jit.sources import digest, python_sources

_FOLDER = Path(__file__).parent


@cache
def op_names() -> tuple[str, ...]:
    """Every op, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/spec.py")))


def check_op_names(names: Iterable[str]) -> None:
    """ConfigurationError for a name that no op has."""
    for name in names:
        if name not in op_names():
            near = difflib.get_close_matches(str(name), op_names(), 1)
            advice = f"did you mean {near[0]!r}?" if near else f"the ops are {', '.join(op_names())}"
            raise ConfigurationError(f"there is no op {name!r}: {advice}")


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
    """The implementation of `op` for `backend`; importing it may compile nothing and touch no device.

    Raises:
        UnsupportedFeatureError: a package that the backend needs is not installed.
    """
    return cast("Implementation", imported(f"pocketllm.kernels.{op}.impl_{backend}", backend))


def imported(module: str, backend: str) -> ModuleType:
    """A module that belongs to a backend; UnsupportedFeatureError where a package that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "pocketllm"):
            raise
        raise UnsupportedFeatureError(
            f"backend {backend!r} needs the package {package!r}, which is not installed: install the extra that "
            "README.md names for the backend"
        ) from None


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

    Args:
        backend: whose implementations.
        device, dtype, cache_dtype: see `OpCall`; the cache's dtype is that of activations unless it is given.
        overrides: implementations by op that replace the backend's own. Each acts or is refused: where one stands for
            a part of a composite, the composite is composed, for a kernel of the whole would leave it out.
    """

    def __init__(
        self,
        backend: str,
        *,
        device: str,
        dtype: str,
        cache_dtype: str | None = None,
        overrides: Mapping[str, Implementation] | None = None,
    ) -> None:
        self.backend = backend
        self.device = device
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self._overrides = dict(overrides or {})
        self._identities = {op: _identity(override) for op, override in self._overrides.items()}
        self._bound: set[str] = set()
        self._composed: set[str] = set()

    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        """See `OpTable.bind`."""
        op = self.resolve(op, weights or {})
        contract = spec(op)
        values = _checked_scalars(contract, scalars)
        given = _checked_weights(contract, weights or {})
        call = OpCall(values, given, device=self.device, dtype=self.dtype, cache_dtype=self.cache_dtype)
        if contract.compose is not None and not self._has_whole(contract, call):
            self._composed.add(op)
            return contract.compose(self, values, given)
        if op in self._overrides:
            bound = _bound_override(op, self._overrides[op], call)
        else:
            bound = select(op, self.backend, call).bind(call)
        self._bound.add(op)
        return bound

    def resolve(self, op: str, weights: Arrays) -> str:
        """The op that binding `op` to these weights means."""
        return op

    def check_overrides_bound(self) -> None:
        """To be called when a model is bound.

        Raises:
            UnsupportedFeatureError: an override is for an op that has not been bound, so that it would never act.
        """
        unused = sorted(self._overrides.keys() - self._bound)
        if unused:
            raise UnsupportedFeatureError(
                f"the override of {unused[0]!r} would never act: this model on backend {self.backend!r} binds "
                f"{', '.join(sorted(self._bound))} (override one of these)"
            )

    def numerics(self) -> str:
        """A digest of the sources of all implementations bound so far, overrides and compositions included.

        An override that is no module of this package may compute what no file shows, so no two tables agree on one.
        """
        own = sorted(self._bound - self._overrides.keys())
        replaced = sorted(self._bound & self._overrides.keys())
        sources = {source for op in own for source in self._sources(op)}
        sources |= {source for op in self._composed for source in python_sources(f"pocketllm.kernels.{op}.spec")}
        facts = (f"{op}: {self._identities[op]}" for op in replaced)
        return digest(sorted(sources), *own, *facts)

    def _sources(self, op: str) -> Iterable[Path]:
        return _module_sources(f"{__package__}.{op}.impl_{self.backend}")

    def _has_whole(self, contract: OpSpec, call: OpCall) -> bool:
        """Whether a composite is bound as one."""
        op, own = contract.name, self.backend
        if op in self._overrides:
            return True
        if own not in backends_of(op) or implementation(op, own).supports(call) is not None:
            return False
        if not self._overrides:
            return True
        parts = _Parts(self)
        parts.add(contract, call.scalars, call.weights)
        return self._overrides.keys().isdisjoint(parts.ops)


class _Parts(OpTable):
    """Notes which ops a composition binds, down to the smallest; none of them can be called."""

    def __init__(self, table: BackendOpTable) -> None:
        self._table = table
        self.ops: set[str] = set()

    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        """See `OpTable.bind`."""
        contract = spec(self._table.resolve(op, weights or {}))
        self.ops.add(contract.name)
        self.add(contract, _checked_scalars(contract, scalars), _checked_weights(contract, weights or {}))
        return _not_to_be_called

    def add(self, contract: OpSpec, scalars: Any, weights: Arrays) -> None:
        """Notes the parts of an op, if it has any."""
        if contract.compose is not None:
            contract.compose(self, scalars, weights)


def _not_to_be_called(*arrays: Any, **named: Any) -> Any:
    raise TypeError("a composition calls its parts when it is called, not when it is bound")


def _bound_override(op: str, override: Implementation, call: OpCall) -> BoundOp:
    """A user's own implementation, bound.

    Raises:
        UnsupportedFeatureError: it refuses the call.
        ConfigurationError: it does not do as an implementation does.
    """
    with _named(op, "supports"):
        reason = override.supports(call)
    if reason is not None and (not isinstance(reason, str) or not reason):
        raise ConfigurationError(
            f"the override of {op!r} answers supports(call) with {reason!r}: return None where it serves the call, "
            "else the reason why not, as text"
        )
    if reason is not None:
        raise UnsupportedFeatureError(f"the override of {op!r} cannot run it here: {reason}")
    with _named(op, "bind"):
        return override.bind(call)


@contextmanager
def _named(op: str, function: str) -> Iterator[None]:
    """What a function of an override raises is said to be its own."""
    try:
        yield
    except UnsupportedFeatureError as refusal:
        raise UnsupportedFeatureError(f"the override of {op!r} cannot run it here: {refusal}") from refusal
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{function} of the override of {op!r} ends with {type(error).__name__}: {error}"
        ) from error


def _identity(override: Implementation) -> str:
    """What tells an override from others: the digest of the sources of a module of these kernels, else a new number.

    What anything else computes, no file shows: it may have state, use modules that are not known here, or have been
    edited after it was imported.
    """
    name = override.__name__ if isinstance(override, ModuleType) else ""
    if not name.startswith(f"{__package__}.") or sys.modules.get(name) is not override:
        return uuid.uuid4().hex
    return digest(sorted(_module_sources(name)))


def _module_sources(module: str) -> Iterator[Path]:
    """The files that a module of the kernels is made of."""
    yield from python_sources(module)
    folder = _FOLDER.joinpath(*module.removeprefix(f"{__package__}.").split(".")[:-1])
    others = [path for path in folder.glob(f"{module.rpartition('.')[2]}.*") if path.suffix != ".py"]
    yield from others
    # What is not Python may include any of the headers.
    yield from _FOLDER.rglob("*.cuh") if others else ()


class ReferenceOpTable(OpTable):
    """The ops' own references on NumPy arrays: the definition that composites are tested against."""

    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        """See `OpTable.bind`."""
        contract = spec(self.resolve(op, weights or {}))
        values = _checked_scalars(contract, scalars)
        given = _checked_weights(contract, weights or {})
        if contract.compose is not None:
            return contract.compose(self, values, given)
        return self.bind_reference(contract, values, given)

    def resolve(self, op: str, weights: Arrays) -> str:
        """See `BackendOpTable.resolve`."""
        return op

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
