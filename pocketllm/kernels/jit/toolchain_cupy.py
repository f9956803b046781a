"""CUDA C as a toolchain: one kernel, compiled by NVRTC for a GPU or by g++ for the emulator, and its launch.

On a device such as ``cuda:0`` arrays are CuPy's; on ``cpu`` they are NumPy's and the same source runs in the emulator
(`pocketllm.kernels.jit.cuda_emulator`). What binds an op sees no difference.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pocketllm import env
from pocketllm.kernels.jit import loading_cupy
from pocketllm.kernels.jit.builds import QUEUE
from pocketllm.kernels.jit.cuda_emulator import compiler, settings
from pocketllm.kernels.jit.cuda_emulator.library import EmulatedKernel
from pocketllm.kernels.jit.cuda_source import INCLUDE_FOLDER, KernelSource, Parameter
from pocketllm.kernels.jit.loading_cupy import DeviceKernel, architecture_of, compile_cubin, device_of
from pocketllm.kernels.jit.sources import digest
from pocketllm.kernels.jit.store import build_lock, kernel_folder

MOST_THREADS = 1024
"""Of a block."""


def obstacle(device: str) -> str | None:
    """Why kernels cannot run on a device, such as ``cpu`` or ``cuda:0``; None where they can."""
    return compiler.obstacle() if device == "cpu" else loading_cupy.obstacle()


def array_module(device: str) -> ModuleType:
    """The library of a device's arrays: NumPy or CuPy."""
    return np if device == "cpu" else loading_cupy.cupy()


class Kernel:
    """A kernel for one device. Making one compiles nothing; a launch refuses arguments of other types.

    Args:
        device: where it runs.
        path: its file.
        function: its name in there with the template's arguments, such as ``rms_norm<float>``.
        parameters: its parameters, in order.
    """

    def __init__(self, device: str, path: str | Path, function: str, **parameters: Parameter) -> None:
        self.source = KernelSource(Path(path), function, parameters)
        self.name = self.source.name
        self._device = device
        self._lock = threading.Lock()
        self._on_device: DeviceKernel | None = None
        self._emulated: dict[settings.Build, EmulatedKernel] = {}

    @property
    def built(self) -> bool:
        """See `Buildable.built`."""
        if self._device == "cpu":
            return settings.current().build in self._emulated
        return self._on_device is not None

    def request(self) -> Kernel:
        """The kernel, to be built when the model that is being bound is complete."""
        for requests in _recorders:
            requests.append(self)
        QUEUE.request(self)
        return self

    def build(self) -> bool:
        """See `Buildable.build`. A kernel that nobody has built is built by its first launch."""
        with self._lock:
            if self.built:
                return True
            if self._device == "cpu":
                return self._build_emulated(settings.current().build)
            return self._build_on_device()

    def _build_emulated(self, build: settings.Build) -> bool:
        folder = _folder("emulator", self.source.key(*compiler.facts(build)))
        library = folder / "kernel.so"
        with build_lock(folder):
            found = library.is_file()
            if not found:
                compiler.compile_library(emulated_unit(self.source), self.name, INCLUDE_FOLDER, build, library)
            self._emulated[build] = EmulatedKernel(self.source, library, build)
        return found

    def _build_on_device(self) -> bool:
        device = device_of(self._device)
        architecture = architecture_of(device)
        folder = _folder("nvrtc", self.source.key(*loading_cupy.facts(architecture)))
        file = folder / "kernel.cubin"
        with build_lock(folder):
            found = file.is_file()
            if not found:
                compiled = compile_cubin(self.source, architecture)
                _write(file, compiled.symbol.encode() + b"\n" + compiled.cubin)
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
            ValueError: no block has this many threads.
            KernelFaultError: the kernel broke a rule of CUDA (in the emulator only).
        """
        self._check(arguments)
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
        if not 0 < math.prod(block) <= MOST_THREADS:
            raise ValueError(f"kernel {self.name}: a block has 1 to {MOST_THREADS} threads, not {list(block)}")
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
        array_type = array_module(self._device).ndarray
        for argument, (name, parameter) in zip(arguments, parameters.items(), strict=True):
            complaint = parameter.complaint(argument, array_type)
            if complaint is not None:
                raise TypeError(f"kernel {self.name}, argument {name}: {complaint}")


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
    """What the code of every kernel for a device depends on, beside its own file: shared files and the compiler's."""
    included = digest(sorted(INCLUDE_FOLDER.glob("**/*.cuh")))
    if device == "cpu":
        return (included, *compiler.facts("plain"))
    return (included, *loading_cupy.facts(architecture_of(device_of(device))))


_recorders: list[list[Kernel]] = []


@contextmanager
def recorded_requests() -> Iterator[list[Kernel]]:
    """The list receives the kernels that ops ask for within, built or not."""
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


def _write(file: Path, content: bytes) -> None:
    """The file appears whole or not at all; the caller holds the folder's lock."""
    scratch = file.with_suffix(".part")
    scratch.write_bytes(content)
    os.replace(scratch, file)
