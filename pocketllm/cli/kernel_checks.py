"""``pocketllm kernels check``: one line for each op, backend and dtype, and the first failure of each in full."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from types import ModuleType
from typing import TextIO

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import Backend, Mode, backend, backend_names
from pocketllm.kernels.checking.cases import WIDEST_EMULATED, check_cases, drawn_cases
from pocketllm.kernels.checking.discovery import modes_of, obstacle
from pocketllm.kernels.checking.files import implementation_in
from pocketllm.kernels.overriding import requested_overrides
from pocketllm.kernels.registry import check_op_names, op_names, spec


def check_all(given: argparse.Namespace, out: TextIO) -> int:
    """Check what the command line asks for.

    Returns:
        1 where an implementation is wrong or nothing could be checked, else 0.

    Raises:
        ConfigurationError: there is no such op, backend or dtype, or the file is no implementation.
        UnsupportedFeatureError: a backend that was asked for by name cannot run here.
    """
    check_op_names(given.op)
    override = None if given.file is None else _override(given)
    checked = wrong = 0
    for op, found, mode in _work(given, out, foreign=override is not None):
        numbers = range(given.cases) if given.case is None else (given.case,)
        cases = drawn_cases(spec(op), given.seed, numbers, emulated=found.emulator is not None)
        report = check_cases(op, found, mode, cases, override=override)
        out.write(f"{op:<18} {found.name:<8} {mode!s:<22} {report}\n")
        if report.failure is not None:
            out.write(f"    {report.failure.error}\n")
            out.write(f"    again: {_again(given, op, found, mode, report.failure.number)}\n")
        out.flush()
        checked += report.agreed
        wrong += report.failure is not None
    if not checked and not wrong:
        out.write("nothing was checked\n")
    return int(wrong > 0 or not checked)


def _work(given: argparse.Namespace, out: TextIO, *, foreign: bool) -> Iterator[tuple[str, Backend, Mode]]:
    """What is to be checked; a backend that cannot be is told of, and one that is checked on less."""
    for found in _backends(given, out):
        modes = [mode for mode in found.modes if given.dtype in (None, str(mode))]
        if found.emulator is not None and modes:
            out.write(f"{'':<18} {found.name:<8} on sizes to {WIDEST_EMULATED}: its kernels run in {found.emulator}\n")
        for op in dict.fromkeys(given.op) or op_names():
            lacks = None if foreign else obstacle(op, found.name)
            if lacks is None:
                yield from ((op, found, mode) for mode in modes_of(op, found) if mode in modes)
            elif given.op:
                out.write(f"{op:<18} {found.name:<8} not checked: {lacks}\n")


def _backends(given: argparse.Namespace, out: TextIO) -> list[Backend]:
    """Those that can be checked here, one at least of them in the dtype that was asked for."""
    found = []
    for name in backend_names() if given.backend is None else (given.backend,):
        try:
            found.append(backend(name, given.device))
        except UnsupportedFeatureError as reason:
            if given.backend is not None:
                raise
            out.write(f"{'':<18} {name:<8} not checked: {reason}\n")
    known = [str(mode) for one in found for mode in one.modes]
    if found and given.dtype is not None and given.dtype not in known:
        raise ConfigurationError(
            f"dtype is {given.dtype!r}: {' or '.join(one.name for one in found)} has {', '.join(dict.fromkeys(known))}"
        )
    return found


def _again(given: argparse.Namespace, op: str, found: Backend, mode: Mode, number: int) -> str:
    """The command that runs the case once more."""
    words = ["pocketllm", "kernels", "check", op, "--backend", found.name, "--device", found.device]
    words += ["--dtype", str(mode), "--seed", str(given.seed), "--case", str(number)]
    return shlex.join(words + ([] if given.file is None else ["--file", given.file]))


def _override(given: argparse.Namespace) -> ModuleType:
    """The module of ``--file``."""
    if len(given.op) != 1 or given.backend is None:
        raise ConfigurationError("--file is an implementation of one op for one backend: name the op and --backend")
    # The backend's adapter decides how its packages are loaded, which importing the file does.
    backend(given.backend, given.device)
    module = implementation_in(given.file)
    requested_overrides({given.op[0]: module})
    return module
