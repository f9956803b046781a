"""CuPy, imported when it is first needed: NVRTC as a compiler, which takes no GPU, and kernels on one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.jit.cuda_source import INCLUDE_FOLDER, KernelSource, Parameter

# Arithmetic as written: what is fused asks for fmaf; quotients and roots are rounded as IEEE 754 says by default.
FLAGS = ("-std=c++17", "-default-device", "--fmad=false", f"-I{INCLUDE_FOLDER}")

_SHARED_BY_DEFAULT = 48 << 10
"""Bytes of shared memory that any launch may take, a kernel's own variables included; more has to be allowed first."""

_LEAST_CAPABILITY = 75

_DEVICE = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)

_ERROR_OUT_OF_MEMORY = 2
"""``cudaErrorMemoryAllocation``, which CuPy does not name."""


def cupy() -> ModuleType:
    """CuPy; UnsupportedFeatureError where it cannot be imported."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"CUDA C is compiled and launched by CuPy, which cannot be imported ({error}): install pocketllm[cuda]"
        ) from error


def device_of(name: str) -> int:
    """The index of a device such as ``cuda`` or ``cuda:1``; ConfigurationError for other names."""
    named = _DEVICE.fullmatch(name)
    if named is None:
        raise ConfigurationError(
            f"there is no device {name!r} for CUDA C: name one such as cuda:0, or cpu to emulate it"
        )
    return int(named[1] or 0)


def obstacle(device: str) -> str | None:
    """Why no kernel can run on a device such as ``cuda:0``; None where one can."""
    try:
        index = device_of(device)
        count = cupy().cuda.runtime.getDeviceCount()
    except (ConfigurationError, UnsupportedFeatureError) as error:
        return str(error)
    except cupy().cuda.runtime.CUDARuntimeError as error:
        return f"CUDA finds no device ({error})"
    if index >= count:
        return f"CUDA finds {count} devices, which are counted from 0"
    capability = int(cupy().cuda.Device(index).compute_capability)
    if capability < _LEAST_CAPABILITY:
        least = _LEAST_CAPABILITY / 10
        return f"{device} has compute capability {capability / 10}, and the kernels need {least}"
    return None


def nvrtc() -> Any:
    """CuPy's binding of NVRTC; UnsupportedFeatureError where there is no such library."""
    found = cupy().cuda.nvrtc
    try:
        found.getVersion()
    except (ImportError, OSError, RuntimeError) as error:  # whichever part of CuPy looks for it
        raise UnsupportedFeatureError(
            f"CUDA C is compiled by NVRTC, which CuPy cannot load ({error}): install pocketllm[cuda]"
        ) from error
    return found


def facts(architecture: str) -> tuple[str, ...]:
    """What machine code depends on, beside the kernel's source."""
    return "nvrtc {}.{}".format(*nvrtc().getVersion()), architecture, f"{FLAGS}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as machine code.

    Attributes:
        cubin: a CUDA binary.
        symbol: the kernel's name in it.
        log: what the assembler says of registers, spills and shared memory.
    """

    cubin: bytes
    symbol: str
    log: str


def compile_cubin(source: KernelSource, architecture: str) -> Compiled:
    """Compiles a kernel for an architecture such as ``sm_90``, which need not be there.

    Raises:
        ConfigurationError: the compiler refuses the code; the message has its own.
    """
    compiler = nvrtc()
    program = compiler.createProgram(source.translation_unit(), f"{source.name}.cu", (), ())
    try:
        compiler.addNameExpression(program, source.function)
        try:
            options = (*FLAGS, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
            compiler.compileProgram(program, options)
        except compiler.NVRTCError as error:
            log = compiler.getProgramLog(program)
            raise ConfigurationError(f"kernel {source.name} does not compile for {architecture}:\n{log}") from error
        symbol = compiler.getLoweredName(program, source.function)
        return Compiled(compiler.getCUBIN(program), symbol, compiler.getProgramLog(program))
    finally:
        compiler.destroyProgram(program)


class DeviceKernel:
    """A kernel on one GPU; launches go to CuPy's current stream there."""

    def __init__(self, source: KernelSource, cubin: bytes, symbol: str, device: int) -> None:
        self._device = cupy().cuda.Device(device)
        self._passed = [_passed_as(parameter) for parameter in source.parameters.values()]
        with self._device:
            module = cupy().cuda.function.Module()
            module.load(cubin)
            self._function = module.get_function(symbol)
            driver = cupy().cuda.driver
            own = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function.ptr)
        self._allowed = _SHARED_BY_DEFAULT - own

    def launch(self, grid: Sequence[int], block: Sequence[int], shared: int, arguments: Sequence[Any]) -> None:
        """Queues it.

        Args:
            grid, block: three sizes each.
            shared: bytes of dynamic shared memory.
            arguments: arrays, numbers and None, of the parameters' types.
        """
        values = tuple(passed(argument) for passed, argument in zip(self._passed, arguments, strict=True))
        with self._device:
            if shared > self._allowed:
                self._allow_shared(shared)
            self._function(tuple(grid), tuple(block), values, shared_mem=shared)

    def _allow_shared(self, shared: int) -> None:
        driver = cupy().cuda.driver
        driver.funcSetAttribute(self._function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        self._allowed = shared


def _passed_as(parameter: Parameter) -> Callable[[Any], np.generic[Any]]:
    """What makes of an argument the number that a launch passes: of an array its address, 0 of None."""
    return _address if parameter.is_array else parameter.number_type


def _address(array: Any) -> np.uint64:
    return np.uint64(0 if array is None else array.data.ptr)


def select_device(name: str) -> None:
    """Makes a device the current one of this thread."""
    cupy().cuda.Device(device_of(name)).use()


def architecture_of(device: int) -> str:
    """Such as ``sm_90``."""
    return f"sm_{cupy().cuda.Device(device).compute_capability}"


def memory_of(device: int) -> tuple[int, int]:
    """Total and free bytes; what CuPy keeps for its next arrays counts as taken."""
    free, total = cupy().cuda.Device(device).mem_info
    return int(total), int(free)


class DeviceStream:
    """A stream of its own on one GPU, and the capture of what is queued on it; to be entered with `with`."""

    def __init__(self, device: int) -> None:
        self._device = cupy().cuda.Device(device)
        with self._device:
            self._stream = cupy().cuda.Stream(non_blocking=True)
        # What a captured graph works on must not be handed to anything else, so it has memory of its own.
        self._graph_memory = cupy().cuda.MemoryPool(self._new_graph_memory)

    def __enter__(self) -> DeviceStream:
        self._device.__enter__()
        self._stream.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stream.__exit__(*raised)
        self._device.__exit__(*raised)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work`, records what it queues as a graph, and returns what queues that graph; called on the stream.

        The first run takes from the device whatever memory the work needs; the second finds it free again and takes
        nothing, as long as the work has let go of what it made.

        Raises:
            MemoryError: the device has not enough.
        """
        with cupy().cuda.using_allocator(self._graph_memory.malloc):
            work()
            self._stream.begin_capture()
            try:
                work()
            finally:
                graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)

    def release_graph_memory(self) -> None:
        """Gives back the memory of graphs, none of which may be queued any more."""
        with self._device:
            self._stream.synchronize()
            self._graph_memory.free_all_blocks()

    def release_memory(self) -> None:
        """Gives back what CuPy keeps for its next arrays on the device."""
        with self._device:
            cupy().get_default_memory_pool().free_all_blocks()

    def _new_graph_memory(self, size: int) -> Any:
        """Memory from the device for the pool of graphs.

        Where there is none, the pool would give back whatever is free in it, and graphs work on that. It does so for
        CUDA's error, so that it gets CuPy's.
        """
        cuda = cupy().cuda
        try:
            return cuda.MemoryPointer(cuda.Memory(size), 0)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != _ERROR_OUT_OF_MEMORY:
                raise
            raise cuda.memory.OutOfMemoryError(size, self._graph_memory.total_bytes() - size) from error
