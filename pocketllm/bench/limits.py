"""What the machine can do at best, measured beside the contenders: memory reads, float32 and int8 products."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np

from pocketllm.bench.process import Remote

READ_BYTES = 256 * 2**20
"""Over all threads: much more than caches hold."""

PRODUCT_SIZE = 2048
TRIES = 3

LIMITS = {"read": "GB/s", "float32 products": "GFLOP/s", "int8 products": "GOP/s"}
"""The unit of each limit; 10^9 bytes, or operations with a multiplication and an addition as two."""

# A kernel chosen by hand for another processor, or another number of threads, would understate what numpy reaches.
_OPENBLAS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class Limits:
    """Measures the limits on a number of threads.

    Args:
        threads: CPU threads.
        size: rows and columns of the matrices.
        read_bytes: bytes that all threads read together.
    """

    def __init__(self, threads: int, size: int, read_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        rng = np.random.default_rng(0)
        self._read = [np.ones(read_bytes // threads // 4, dtype=np.int32) for _ in range(threads)]
        self._floats = rng.standard_normal((size, size), dtype=np.float32)
        self._int8 = _int8_product(rng.integers(-127, 128, (size, size), dtype=np.int8), threads)

    def measure(self) -> dict[str, float]:
        """One reading of every limit; each is the median of a few tries."""
        operations = 2 * self._floats.shape[0] ** 3
        readings = {
            "read": sum(part.nbytes for part in self._read) / _seconds(self._read_all),
            "float32 products": operations / _seconds(lambda: self._floats @ self._floats),
        }
        if self._int8 is not None:
            readings["int8 products"] = operations / _seconds(self._int8)
        return {name: reading / 1e9 for name, reading in readings.items()}

    def _read_all(self) -> None:
        # The largest of int32: numpy reduces it with the widest loads, and nothing is written.
        list(self._pool.map(np.max, self._read))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def start(threads: int, *, size: int = PRODUCT_SIZE, read_bytes: int = READ_BYTES) -> Remote:
    """`Limits` in a process of their own."""
    arguments = {"threads": threads, "size": size, "read_bytes": read_bytes}
    environment = dict.fromkeys(_OPENBLAS) | {"OPENBLAS_NUM_THREADS": str(threads)}
    return Remote("limits", f"{__name__}:Limits", arguments, environment)


def _int8_product(matrix: Any, threads: int) -> Callable[[], Any] | None:
    """torch's product of int8 matrices with an int32 result, or None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    tensor = torch.from_numpy(matrix)
    return lambda: torch._int_mm(tensor, tensor)


def _seconds(work: Callable[[], Any]) -> float:
    work()  # threads start and pages are touched
    taken = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)
