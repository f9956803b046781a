"""Kernels from bound to built: ops ask for them while a model is bound, the runtime builds them at the end.

So the number of kernels is known before the first is compiled, progress can be shown, and nothing is left to compile
for the first request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)


class Buildable(Protocol):
    """A kernel of some toolchain."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def built(self) -> bool:
        """Whether it can be run."""

    def build(self) -> bool:
        """Makes it ready to run; True where its code was compiled before and only loaded."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What making a model's kernels ready took.

    Attributes:
        compiled, loaded: how many were compiled, and how many were found compiled.
        seconds: for both.
    """

    compiled: int
    loaded: int
    seconds: float


class BuildQueue:
    """Kernels that bound ops need, in the order in which they were asked for. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Buildable] = {}

    def request(self, kernel: Buildable) -> None:
        """Notes that a bound op needs this kernel."""
        with self._lock:
            if not kernel.built:
                self._waiting[id(kernel)] = kernel

    def build_all(self, progress: Callable[[str, int, int], None]) -> BuildReport:
        """Builds whatever has been asked for; reports ``("kernels", done, total)``."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        start, loaded = time.perf_counter(), 0
        for done, kernel in enumerate(waiting):
            progress("kernels", done, len(waiting))
            loaded += kernel.build()
        progress("kernels", len(waiting), len(waiting))
        report = BuildReport(len(waiting) - loaded, loaded, time.perf_counter() - start)
        logger.info("kernels: %d compiled, %d loaded in %.1f s", report.compiled, report.loaded, report.seconds)
        return report


QUEUE = BuildQueue()
"""The process's own."""
