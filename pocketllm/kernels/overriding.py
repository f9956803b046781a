"""Implementations of a user's own in place of a backend's: for experiments, on any model.

``LLM(..., kernels={"rms_norm": mine})`` and ``with pocketllm.kernels.override("rms_norm", mine):`` are the same thing
for one model and for all that are loaded within. `mine` is an `Implementation`: anything with ``supports(call)`` and
``bind(call)``, such as a module like ``rms_norm/impl_torch.py``. It is checked against the op's contract before any
weight is read, and either acts or is refused. ``pocketllm.kernels.check("rms_norm", mine, backend="numba")`` checks it
without a model.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import Mode
from pocketllm.kernels.checking.arrays import backend as adapter
from pocketllm.kernels.checking.cases import CheckReport, check_cases, drawn_cases, timed_cases
from pocketllm.kernels.checking.comparison import KernelMismatchError
from pocketllm.kernels.contract import Implementation
from pocketllm.kernels.registry import check_op_names, spec

CASES = 24
"""How many cases an override is checked on."""

_active: ContextVar[tuple[override, ...]] = ContextVar("overrides", default=())


class override:
    """Models that are loaded within use `implementation` for `op`; it holds for this thread or task.

    Of several for the same op the one that was entered last holds. Whatever order they are left in, each takes away
    what it brought; one may be entered several times.

    Attributes:
        given: the implementation by its op.

    Raises:
        ConfigurationError: there is no such op, or `implementation` is none.
    """

    def __init__(self, op: str, implementation: Implementation) -> None:
        _check_given({op: implementation})
        self.given = {op: implementation}

    def __enter__(self) -> None:
        _active.set((*_active.get(), self))

    def __exit__(self, *raised: object) -> None:
        latest_first = list(reversed(_active.get()))
        latest_first.remove(self)
        _active.set(tuple(reversed(latest_first)))


def check(
    op: str,
    implementation: Implementation,
    *,
    backend: str,
    device: str | None = None,
    dtype: str = "float32",
    cases: int = CASES,
    seed: int = 0,
) -> CheckReport:
    """What an implementation that gets the arrays of `backend` makes of `cases` cases of its op's contract.

    Printed, it is the verdict; where the implementation is wrong, ``failure.error`` has the first number that is off.

    Args:
        op: the op that it implements.
        implementation: what is checked.
        backend: whose arrays it gets.
        device: where they lie; the backend's own choice by default.
        dtype: the mode that it runs in, by its name in ``pocketllm kernels check``, such as ``bfloat16``.
        cases: how many; the sizes of the first are the least and the most, and of the next some as wide as in models.
        seed: what they are drawn from.

    Raises:
        ConfigurationError: there is no such op, `implementation` is none, the backend has no such mode, or another
            argument cannot be used.
        UnsupportedFeatureError: there is no such backend, or it cannot run here.
    """
    _check_given({op: implementation})
    _check_numbers(cases=(cases, 1), seed=(seed, 0))
    for name, value in (("backend", backend), ("device", device), ("dtype", dtype)):
        if not isinstance(value, str) and (name != "device" or value is not None):
            raise ConfigurationError(f"{name} is {value!r}: give its name")
    found = adapter(backend, device)
    mode = next((mode for mode in found.modes if str(mode) == dtype), None)
    if mode is None:
        raise ConfigurationError(f"dtype is {dtype!r}: {backend} has {', '.join(map(str, found.modes))}")
    drawn = drawn_cases(spec(op), seed, range(cases), emulated=found.emulator is not None)
    return check_cases(op, found, mode, drawn, override=implementation)


def _check_numbers(**given: tuple[object, int]) -> None:
    """ConfigurationError for a value that is no whole number from the least that goes with it."""
    for name, (value, least) in given.items():
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} is {value!r}: give a whole number from {least}")


def requested_overrides(given: Mapping[str, Any]) -> dict[str, Implementation]:
    """The overrides that hold where this is called, those of `given` before those of `override`.

    Raises:
        ConfigurationError: there is no op of a name in `given`, or a value is no implementation.
    """
    _check_given(given)
    return {op: found for entered in _active.get() for op, found in entered.given.items()} | dict(given)


def _check_given(overrides: Mapping[str, Any]) -> None:
    check_op_names(overrides)
    for op, found in overrides.items():
        if isinstance(found, type):
            name = found.__name__
            raise ConfigurationError(f"the override of {op!r} is the class {name}: give an instance, such as {name}()")
        lacking = [name for name in ("supports", "bind") if not callable(getattr(found, name, None))]
        if lacking:
            raise ConfigurationError(
                f"the override of {op!r} is {reprlib.repr(found)}, which has no {' and no '.join(lacking)}: "
                "give an object or a module with the functions supports(call) and bind(call)"
            )


def check_overrides(overrides: Mapping[str, Implementation], on: str, *, device: str, dtype: str) -> None:
    """See that each override does what its op's contract says, with the arrays of backend `on`.

    Where an override refuses every drawn case, the sizes that the op is timed at are tried.

    Raises:
        KernelMismatchError: one does not; the message has the first number that is off.
        UnsupportedFeatureError: one refuses every case, so that nothing is known of it.
    """
    for op, implementation in overrides.items():
        found, mode, contract = adapter(on, device), Mode(dtype, dtype), spec(op)
        drawn = drawn_cases(contract, 0, range(CASES), emulated=found.emulator is not None)
        for cases in (drawn, timed_cases(contract, 0)):
            report = check_cases(op, found, mode, cases, override=implementation)
            if report.failure is not None:
                error = report.failure.error
                raise KernelMismatchError(f"an override does not do what the contract says: {error}", error.mismatch)
            if report.agreed:
                break
        else:
            raise UnsupportedFeatureError(
                f"the override of {op!r} refuses every case of its contract, so that it cannot be checked: "
                f"{report.refusal}"
            )
