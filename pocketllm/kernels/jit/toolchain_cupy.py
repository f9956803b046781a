"""CUDA C as a toolchain: one kernel, compiled by NVRTC for a GPU or by g++ for the emulator, and its launch.

On a device such as ``cuda:0`` arrays are CuPy's; on ``cpu`` they are NumPy's and the same source runs in the emulator
(`pocketllm.kernels.jit.cuda_emulator`). What binds an op sees no difference.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pocketllm import env
from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit import loading_cupy
from pocketllm.kernels.jit.builds import QUEUE
from pocketllm.kernels.jit.cuda_emulator import compiler, settings
from pocketllm.kernels.jit.cuda_emulator.library import EmulatedKernel
from pocketllm.kernels.jit.cuda_source import INCLUDE_FOLDER, KernelSource, Parameter
from pocketllm.kernels.jit.loading_cupy import DeviceKernel, architecture_of, compile_cubin, device_of
from pocketllm.kernels.jit.store import build_lock, is_intact, kernel_folder, seal, write

MOST_THREADS = 1024
"""Of a block."""

_LARGEST_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
_LARGEST_BLOCK = (1024, 1024, 64)
"""What CUDA launches on any device: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""

_MOST_SHARED = 64 << 10
"""Bytes of shared memory of a block on the device that has least, of compute capability 7.5."""


def obstacle(device: str) -> str | None:
    """Why kernels cannot run on a device, such as ``cpu`` or ``cuda:0``; None where they can."""
    return compiler.obstacle() if device == "cpu" else loading_cupy.obstacle(device)


def array_module(device: str) -> ModuleType:
    """The library of a device's arrays: NumPy or CuPy."""
    return np if device == "cpu" else loading_cupy.cupy()


class Kernel:
    """A kernel for one device. Making one compiles nothing; a launch refuses arguments of other types.

    Args:
        device: where it runs.
        path: its file. ConfigurationError where no compiler can be told of it.
        function: its name in there with the template's arguments, such as ``rms_norm<float>``.
        parameters: its parameters, in order.
    """

    def __init__(self, device: str, path: str | Path, function: str, **parameters: Parameter) -> None:
        self.source = KernelSource(Path(path).resolve(), function, parameters)
        self.name = self.source.name
        if any(character in str(self.source.path) for character in '"\n'):
            raise ConfigurationError(
                f"kernel {self.name}: {path} has a quotation mark or a line break, which #include cannot name: rename"
            )
        self._device = device
        self._index = None if device == "cpu" else device_of(device)
        self._lock = threading.Lock()
        self._on_device: DeviceKernel | None = None
        self._emulated: dict[settings.Build, EmulatedKernel] = {}

    @cached_property
    def _array_type(self) -> type[Any]:
        found: type[Any] = array_module(self._device).ndarray
        return found

    @property
    def built(self) -> bool:
        """See `Buildable.built`."""
        if self._index is None:
            return settings.current().build in self._emulated
        return self._on_device is not None

    def request(self) -> Kernel:
        """The kernel, to be built when the model that is being bound is complete."""
        for requests in _recorders:
            requests.append(self)
        if not _recorders:
            QUEUE.request(self)
        return self

    def build(self) -> bool:
        """See `Buildable.build`. A kernel that nobody has built is built by its first launch."""
        with self._lock:
            if self.built:
                return True
            if self._index is None:
                return self._build_emulated(settings.current().build)
            return self._build_on_device(self._index)

    def _build_emulated(self, build: settings.Build) -> bool:
        folder = _folder("emulator", self.source.key(*compiler.facts(build)))
        library = folder / "kernel.so"
        with build_lock(folder):
            found = is_intact(library)
            if not found:
                compiler.compile_library(emulated_unit(self.source), self.name, INCLUDE_FOLDER, build, library)
                seal(library)
            self._emulated[build] = EmulatedKernel(self.source, library, build)
        return found

    def _build_on_device(self, device: int) -> bool:
        architecture = architecture_of(device)
        folder = _folder("nvrtc", self.source.key(*loading_cupy.facts(architecture)))
        file = folder / "kernel.cubin"
        with build_lock(folder):
            found = is_intact(file)
            if not found:
                compiled = compile_cubin(self.source, architecture)
                write(file, compiled.symbol.encode() + b"\n" + compiled.cubin)
                seal(file)
            symbol, _, cubin = file.read_bytes().partition(b"\n")
        self._on_device = DeviceKernel(self.source, cubin, symbol.decode(), device)
        return found

    def __call__(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared: int = 0) -> None:
        """Launches it; nothing happens where the grid is empty.

        Args:
            grid, block: one to three sizes, in blocks and in threads.
            arguments: one for each parameter.
            shared: bytes of dynamic shared memory.

        Raises:
            TypeError: the arguments are not those that the kernel declares.
            ValueError: CUDA launches no such grid, block or shared memory on some device that has the language.
            KernelFaultError: the kernel broke a rule of CUDA (in the emulator only).
        """
        self._check(arguments)
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
        self._check_sizes(grid, block, shared)
        if math.prod(grid) == 0:
            return
        if not self.built:
            self.build()
        if self._on_device is not None:
            self._on_device.launch(grid, block, shared, arguments)
        else:
            emulation = settings.current()
            self._emulated[emulation.build].launch(grid, block, shared, arguments, emulation.seed)

    def _check(self, arguments: Sequence[Any]) -> None:
        parameters = self.source.parameters
        if len(arguments) != len(parameters):
            raise TypeError(f"kernel {self.name} takes {len(parameters)} arguments, not {len(arguments)}")
        for argument, (name, parameter) in zip(arguments, parameters.items(), strict=True):
            complaint = parameter.complaint(argument, self._array_type, self._index)
            if complaint is not None:
                raise TypeError(f"kernel {self.name}, argument {name}: {complaint}")

    def _check_sizes(self, grid: Sequence[int], block: Sequence[int], shared: int) -> None:
        if not 0 < math.prod(block) <= MOST_THREADS:
            raise ValueError(f"kernel {self.name}: a block has 1 to {MOST_THREADS} threads, not {list(block)}")
        for name, sizes, largest in (("grid", grid, _LARGEST_GRID), ("block", block, _LARGEST_BLOCK)):
            if any(not 0 <= size <= most for size, most in zip(sizes, largest, strict=True)):
                raise ValueError(f"kernel {self.name}: a {name} is {list(largest)} at most, not {list(sizes)}")
        if not 0 <= shared <= _MOST_SHARED:
            raise ValueError(
                f"kernel {self.name}: a block has up to {_MOST_SHARED} bytes of shared memory, not {shared}"
            )


def emulated_unit(source: KernelSource) -> str:
    """A kernel's translation unit for the emulator: with CUDA's language before and the call of one thread after it."""
    arguments = ", ".join(
        f"*reinterpret_cast<{parameter.declaration} const*>(arguments + {index})"
        for index, parameter in enumerate(source.parameters.values())
    )
    return (
        '#include "cuda.hpp"\n'
        f"{source.translation_unit()}"
        '__attribute__((no_sanitize("thread"))) void emulator::run_thread(const uint64_t* arguments) {\n'
        f"  ::{source.function}({arguments});\n"
        "}\n"
    )


def compiled_with(device: str) -> tuple[str, ...]:
    """What the code of every kernel for a device depends on, beside its source and the headers."""
    if device == "cpu":
        return compiler.facts("plain")
    return loading_cupy.facts(architecture_of(device_of(device)))


_recorders: list[list[Kernel]] = []


@contextmanager
def recorded_requests() -> Iterator[list[Kernel]]:
    """The list receives the kernels that ops ask for within, built or not, in place of the queue of builds."""
    requests: list[Kernel] = []
    _recorders.append(requests)
    try:
        yield requests
    finally:
        _recorders.remove(requests)


def _folder(toolchain: str, key: str) -> Path:
    """Where compiled code is kept, or lies until the end of the process where the cache cannot be used."""
    folder = kernel_folder(env.CACHE_DIR.read(), toolchain, key)
    if folder is None:
        folder = Path(_temporary_folder().name) / toolchain / key
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pocketllm-cuda-")
