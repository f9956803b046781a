"""How kernels are emulated: a setting of the process, for whoever tests them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Build = Literal["plain", "checked", "address"]


@dataclass(frozen=True, slots=True)
class Emulation:
    """How kernels run.

    Attributes:
        build: ``plain``; ``checked``, which reports races and accesses that are out of bounds or misaligned;
            ``address``, for a process with AddressSanitizer's library in it
            (``LD_PRELOAD=$(g++ -print-file-name=libasan.so)``).
        seed: of the order in which lanes and warps get their turn; 0 is their own order.
    """

    build: Build = "plain"
    seed: int = 0


_current = Emulation()


def current() -> Emulation:
    """What holds now."""
    return _current


@contextmanager
def emulated(build: Build = "plain", seed: int = 0) -> Iterator[None]:
    """Kernels launched within, by any thread, run like this."""
    global _current
    before, _current = _current, Emulation(build, seed)
    try:
        yield
    finally:
        _current = before
