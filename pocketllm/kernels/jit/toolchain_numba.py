"""Numba as a toolchain: what every kernel is compiled with, where its code is kept, and the threads that run it.

Floating-point arithmetic is IEEE 754 as written: no fastmath, no contraction. A fused multiply-add is asked for by
name (`pocketllm.kernels.simd_numba.fma`).

Threads. Parallel kernels run on Numba's pool: OpenMP where it is there, else Numba's own ``workqueue``, which ends the
process when two threads call it at once, so that calls take turns (`pool`). Once a parallel kernel has run, a forked
child must not run another one (OpenMP ends the child, with a message): start processes with ``spawn``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import numba.core.config
import numba.extending
from numba import types

from pocketllm import env
from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.builds import QUEUE
from pocketllm.kernels.jit.sources import digest, python_sources
from pocketllm.kernels.jit.store import build_lock, kernel_folder

numba_config: Any = numba.core.config

FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
"""Every kernel's; the numpy error model divides as IEEE 754 does, without a branch."""

# Of Numba's automatic transformations only the loops that say prange, so that threads split outputs and nothing else.
_PARALLEL = {
    "prange": True,
    "comprehension": False,
    "fusion": False,
    "inplace_binop": False,
    "numpy": False,
    "reduction": False,
    "setitem": False,
    "stencil": False,
}

_SPINS = "10000"
"""How often an idle thread looks for work before it sleeps: about 20 microseconds. On a machine that other processes
use, a thread that spins longer keeps from the processor the very thread that it waits for."""

_build_lock = threading.Lock()
_pool_lock = threading.Lock()


def device(function: Callable[..., Any]) -> Any:
    """A function that kernels call; it becomes part of each of them, so that constant arguments specialise it."""
    return numba.njit(forceinline=True, **FLAGS)(function)


def intrinsic(typed: Callable[..., Any]) -> Any:
    """A function of kernels whose LLVM code is written out: ``typed(typing context, *types) -> (signature, emit)``."""
    return numba.extending.intrinsic(typed)


def array(dtype: types.Type, dims: int) -> types.Array:
    """The type of a contiguous array that a kernel writes."""
    return types.Array(dtype, dims, "C")


def readonly(dtype: types.Type, dims: int) -> types.Array:
    """The type of a contiguous array that a kernel only reads; one that could be written is taken too."""
    return types.Array(dtype, dims, "C", readonly=True)


class Kernel:
    """A function compiled for one signature. Making one compiles nothing; it refuses arguments of other types."""

    def __init__(self, function: Callable[..., Any], *arguments: types.Type, parallel: bool = False) -> None:
        self.name = f"{function.__module__.removeprefix('pocketllm.kernels.')}:{function.__name__}"
        self._function = function
        self._arguments = arguments
        self._parallel = parallel
        self._run: Any = None

    @property
    def built(self) -> bool:
        """See `Buildable.built`."""
        return self._run is not None

    def request(self) -> Kernel:
        """The kernel, to be built when the model that is being bound is complete."""
        QUEUE.request(self)
        return self

    def build(self) -> bool:
        """See `Buildable.build`. A kernel that nobody has built is built by its first call."""
        with _build_lock:
            if self._run is not None:
                return True
            choose_threading_layer()
            options: dict[str, Any] = {"parallel": _PARALLEL} if self._parallel else {}
            dispatcher = numba.njit(**FLAGS, **options)(self._function)
            folder = kernel_folder(env.CACHE_DIR.read(), "numba", self._key())
            if folder is None:
                dispatcher.compile(self._arguments)
            else:
                with build_lock(folder), _cache_folder(str(folder)):
                    dispatcher.enable_caching()
                    dispatcher.compile(self._arguments)
            dispatcher.disable_compile()
            self._run = dispatcher
            return bool(dispatcher.stats.cache_hits)

    def _key(self) -> str:
        return digest(python_sources(self._function.__module__), *compiler())

    def __call__(self, *arguments: Any) -> Any:
        """Runs it."""
        if self._run is None:
            self.build()
        return self._run(*arguments)


@contextlib.contextmanager
def _cache_folder(folder: str) -> Iterator[None]:
    """Numba keeps a function's code where this setting points when caching is turned on for it."""
    before, numba_config.CACHE_DIR = numba_config.CACHE_DIR, folder
    try:
        yield
    finally:
        numba_config.CACHE_DIR = before


def compiler() -> tuple[str, ...]:
    """What else compiled code depends on besides its sources: versions, settings and the processor."""
    versions = f"numba {numba.__version__}", f"llvmlite {llvmlite.__version__}"
    return (*versions, f"{FLAGS} {_PARALLEL}", *target())


def target() -> tuple[str, str]:
    """The processor that code is made for: its name and its features, as Numba's own settings have them or as it is."""
    name = numba_config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = numba_config.CPU_FEATURES
    return name, llvmlite.binding.get_host_cpu_features().flatten() if features is None else features


def has_features(*names: str) -> bool:
    """Whether code may use all of these features of the processor, such as ``avx2``."""
    return {f"+{name}" for name in names} <= set(target()[1].split(","))


def choose_threading_layer() -> None:
    """OpenMP or workqueue, unless Numba's own setting names one; without effect once threads run."""
    if numba_config.THREADING_LAYER != "default":
        return
    # The variable of GNU OpenMP, which reads it when it is loaded. Its own choice is to spin for milliseconds.
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        importlib.import_module("numba.np.ufunc.omppool")
        numba_config.THREADING_LAYER = "omp"
    except ImportError:  # built without OpenMP, or its library is missing
        numba_config.THREADING_LAYER = "workqueue"


def reserve_threads(threads: int | None) -> int:
    """How many threads a runtime that asks for `threads` gets; None asks for one for each processor.

    Raises:
        ConfigurationError: more than Numba's pool has, whose size is fixed when Numba is imported.
    """
    choose_threading_layer()
    if threads is None:
        return int(numba_config.NUMBA_NUM_THREADS)
    if threads > numba_config.NUMBA_NUM_THREADS:
        raise ConfigurationError(
            f"threads is {threads}, but Numba's pool has {numba_config.NUMBA_NUM_THREADS}: ask for at most as many, or "
            f"set NUMBA_NUM_THREADS={threads} in the environment of the process"
        )
    return threads


@contextlib.contextmanager
def pool(threads: int) -> Iterator[None]:
    """Parallel kernels within run on so many threads (a setting of the calling thread)."""
    with _pool_lock if numba_config.THREADING_LAYER == "workqueue" else contextlib.nullcontext():
        numba.set_num_threads(threads)
        yield
