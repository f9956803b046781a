"""Implementations of a user's own in place of a backend's: for experiments, on any model.

``LLM(..., kernels={"rms_norm": mine})`` and ``with pocketllm.kernels.override("rms_norm", mine):`` are the same thing
for one model and for all that are loaded within. `mine` is an `Implementation`: anything with ``supports(call)`` and
``bind(call)``, such as a module like ``rms_norm/impl_torch.py``. It is checked against the op's contract before any
weight is read, and either acts or is refused. ``pocketllm.kernels.check("rms_norm", mine, backend="numba")`` checks it
without a model.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
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

_active: ContextVar[Mapping[str, Implementation]] = ContextVar("overrides", default=MappingProxyType({}))


@contextlib.contextmanager
def override(op: str, implementation: Implementation) -> Iterator[None]:
    """Models that are loaded within use `implementation` for `op`; it holds for this thread or task.

    Raises:
        ConfigurationError: there is no such op, or `implementation` is none.
    """
    token = _active.set(requested_overrides({op: implementation}))
    try:
        yield
    finally:
        _active.reset(token)


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
        cases: how many; the sizes of the first are the least and the most.
        seed: what they are drawn from.

    Raises:
        ConfigurationError: there is no such op, `implementation` is none, or the backend has no such mode.
        UnsupportedFeatureError: there is no such backend, or it cannot run here.
    """
    override = requested_overrides({op: implementation})[op]
    found = adapter(backend, device)
    mode = next((mode for mode in found.modes if str(mode) == dtype), None)
    if mode is None:
        raise ConfigurationError(f"dtype is {dtype!r}: {backend} has {', '.join(map(str, found.modes))}")
    return check_cases(op, found, mode, drawn_cases(spec(op), seed, range(cases)), override=override)


def requested_overrides(given: Mapping[str, Any]) -> dict[str, Implementation]:
    """The overrides that hold where this is called, those of `given` before those of `override`.

    Raises:
        ConfigurationError: there is no op of a name in `given`, or a value is no implementation.
    """
    check_op_names(given)
    for op, implementation in given.items():
        lacking = [name for name in ("supports", "bind") if not callable(getattr(implementation, name, None))]
        if lacking:
            raise ConfigurationError(
                f"the override of {op!r} is {reprlib.repr(implementation)}, which has no {' and no '.join(lacking)}: "
                "give an object or a module with supports(call) and bind(call)"
            )
    return {**_active.get(), **given}


def check_overrides(overrides: Mapping[str, Implementation], on: str, *, device: str, dtype: str) -> None:
    """See that each override does what its op's contract says, with the arrays of backend `on`.

    Where an override refuses every small case, the sizes that the op is timed at are tried.

    Raises:
        KernelMismatchError: one does not; the message has the first number that is off.
        UnsupportedFeatureError: one refuses every case, so that nothing is known of it.
    """
    for op, implementation in overrides.items():
        found, mode, contract = adapter(on, device), Mode(dtype, dtype), spec(op)
        for cases in (drawn_cases(contract, 0, range(CASES)), timed_cases(contract, 0)):
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
