"""CuPy, imported when it is first needed: NVRTC as a compiler, which takes no GPU, and kernels on one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.cuda_source import INCLUDE_FOLDER, KernelSource

# Arithmetic as written: what is fused asks for fmaf; quotients and roots are rounded as IEEE 754 says by default.
FLAGS = ("-std=c++17", "-default-device", "--fmad=false", f"-I{INCLUDE_FOLDER}")

_SHARED_BY_DEFAULT = 48 << 10
"""Bytes of dynamic shared memory that any launch may ask for; more has to be allowed first."""


def cupy() -> ModuleType:
    """CuPy; ImportError where it is not installed."""
    return importlib.import_module("cupy")


def obstacle() -> str | None:
    """Why no kernel can run on a GPU here; None where one can."""
    try:
        devices = cupy().cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): install pocketllm[cuda]"
    except cupy().cuda.runtime.CUDARuntimeError as error:
        return f"CUDA finds no device ({error})"
    return None if devices else "CUDA finds no device"


def _nvrtc() -> Any:
    return importlib.import_module("cupy.cuda").nvrtc


def facts(architecture: str) -> tuple[str, ...]:
    """What machine code depends on, beside the kernel's source."""
    return "nvrtc {}.{}".format(*_nvrtc().getVersion()), architecture, f"{FLAGS}"


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
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source.translation_unit(), f"{source.name}.cu", (), ())
    try:
        nvrtc.addNameExpression(program, source.function)
        try:
            options = (*FLAGS, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise ConfigurationError(f"kernel {source.name} does not compile for {architecture}:\n{log}") from error
        symbol = nvrtc.getLoweredName(program, source.function)
        return Compiled(nvrtc.getCUBIN(program), symbol, nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


class DeviceKernel:
    """A kernel on one GPU; launches go to CuPy's current stream there."""

    def __init__(self, source: KernelSource, cubin: bytes, symbol: str, device: int) -> None:
        self._device = cupy().cuda.Device(device)
        self._shared = _SHARED_BY_DEFAULT
        self._numbers = [parameter.number_type for parameter in source.parameters.values()]
        with self._device:
            module = cupy().cuda.function.Module()
            module.load(cubin)
            self._function = module.get_function(symbol)

    def launch(self, grid: Sequence[int], block: Sequence[int], shared: int, arguments: Sequence[Any]) -> None:
        """Queues it.

        Args:
            grid, block: three sizes each.
            shared: bytes of dynamic shared memory.
            arguments: arrays, numbers and None, of the parameters' types.
        """
        values = tuple(number(_value(argument)) for number, argument in zip(self._numbers, arguments, strict=True))
        with self._device:
            if shared > self._shared:
                self._allow_shared(shared)
            self._function(tuple(grid), tuple(block), values, shared_mem=shared)

    def _allow_shared(self, shared: int) -> None:
        driver = cupy().cuda.driver
        driver.funcSetAttribute(self._function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        self._shared = shared


def _value(argument: Any) -> Any:
    """What is passed: of an array its address."""
    if hasattr(argument, "__cuda_array_interface__"):
        return argument.data.ptr
    return 0 if argument is None else argument


def device_of(name: str) -> int:
    """The index of a device such as ``cuda`` or ``cuda:1``."""
    return int(name.partition(":")[2] or 0)


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
        self._graph_memory = cupy().cuda.MemoryPool()

    def __enter__(self) -> DeviceStream:
        self._device.__enter__()
        self._stream.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stream.__exit__(*raised)
        self._device.__exit__(*raised)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work`, records what it queues as a graph, and returns what queues that graph; called on the stream.

        The first run takes from the device whatever memory the work needs, which cannot be done while it is recorded.
        """
        with cupy().cuda.using_allocator(self._graph_memory.malloc):
            work()
            self._stream.begin_capture()
            try:
                work()
            finally:
                graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)
