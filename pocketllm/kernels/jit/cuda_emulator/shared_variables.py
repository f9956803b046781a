"""A kernel's variables: those in shared memory are kept apart and found by name, all others are refused.

For the compiler a variable in shared memory is local to a thread of the host (``__shared__`` in cuda.hpp), and nothing
else of a kernel is. So its symbol tells what it is, in whatever function, template or file it is declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.cuda_emulator.tools import output_of

GAP = 1024
"""Bytes after each variable, in which an access past its end is noticed."""

_ANCHOR = "emulator::shared_anchor"
_GUARD = "guard variable for "
_COMPILERS = ("DW.ref.", "__odr_asan")
"""How variables begin that the compiler makes for itself."""

_SECTION = re.compile(r"\t(?:\.section\t(\S+?),|\.(?:text|data|bss)\b)")


@dataclass(frozen=True, slots=True)
class SharedVariable:
    """A variable in shared memory.

    Attributes:
        name: without the function that it stands in.
        offset: bytes from ``shared_anchor`` of runtime.cpp on.
        nbytes: its size.
    """

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    start: int
    nbytes: int
    section: str


def spread(assembly: str) -> str:
    """The compiler's output with a gap after each variable in shared memory."""
    lines, section = [], ""
    for line in assembly.splitlines(keepends=True):
        lines.append(line)
        if begun := _SECTION.match(line):
            section = begun[1] or ""
        elif section.startswith(".tbss") and line.startswith("\t.zero\t"):
            lines.append(f"\t.zero\t{GAP}\n")
    return "".join(lines)


def refuse_other_variables(compiled: Path, kernel: str) -> None:
    """Raises ConfigurationError where a kernel's object file has variables that CUDA or the emulator does not allow."""
    for symbol in _variables(compiled):
        name = symbol.name.rpartition("::")[2]
        if symbol.name.startswith(_GUARD) or symbol.section.startswith(".tdata"):
            raise ConfigurationError(
                f"kernel {kernel}: the shared variable {name} is initialised, by a value or a constructor. A variable "
                "in shared memory begins with anything: let threads write it, then wait at a barrier"
            )
        if not symbol.section.startswith(".tbss") and not symbol.name.startswith(_COMPILERS):
            raise ConfigurationError(
                f"kernel {kernel}: the variable {name} would lie in device memory and keep its value from launch to "
                "launch, which is not emulated. Pass an array, or declare it __shared__ or __constant__"
            )


def shared_variables(library: Path) -> tuple[SharedVariable, ...]:
    """Those of the kernel in a library."""
    symbols = {symbol.name: symbol for symbol in _variables(library) if symbol.section.startswith(".tbss")}
    anchor = symbols.pop(_ANCHOR).start
    return tuple(
        SharedVariable(symbol.name.rpartition("::")[2], symbol.start - anchor, symbol.nbytes)
        for symbol in symbols.values()
    )


def _variables(file: Path) -> Iterator[_Symbol]:
    """What a kernel can write to, by the names that the source gives."""
    listing = output_of(
        ["nm", "--format=sysv", "--demangle", str(file)], f"what lies in shared memory cannot be read from {file}"
    )
    for line in listing.splitlines():
        fields = [field.strip() for field in line.rsplit("|", 6)]
        if len(fields) != 7:
            continue
        name, start, _, kind, nbytes, _, section = fields
        writable = section.startswith((".tbss", ".tdata", ".bss", ".data")) and not section.startswith(".data.rel.ro")
        if kind in ("TLS", "OBJECT") and nbytes and writable:
            yield _Symbol(name, int(start, 16), int(nbytes, 16), section)
