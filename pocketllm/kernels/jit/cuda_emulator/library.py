"""An emulated kernel, loaded: which memory of its own it has, and its launch."""

from __future__ import annotations

import ctypes
import signal
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pocketllm.kernels.jit.cuda_emulator.faults import Fault, Memory, error_of
from pocketllm.kernels.jit.cuda_emulator.settings import Build
from pocketllm.kernels.jit.cuda_emulator.shared_variables import shared_variables
from pocketllm.kernels.jit.cuda_source import KernelSource

_REGION = struct.Struct("@QNi4x")
"""``Region`` of runtime.hpp."""

_LAUNCH = "emulator_launch"


class _Stacks(ctypes.Structure):
    """``Stacks`` of stacks.hpp."""

    _fields_ = [("memory", ctypes.c_void_p), ("count", ctypes.c_uint64)]


_STACKS = _Stacks()
_LAUNCHING = threading.Lock()
"""A library keeps its state in variables, whoever has loaded it; stacks and handlers of signals are the process's."""


class EmulatedKernel:
    """A kernel in a library that `compile_library` made. Launches of a process take turns."""

    def __init__(self, source: KernelSource, library: Path, build: Build) -> None:
        self._source = source
        self._library = library
        self._copies = build == "address"
        self._values = struct.Struct("@" + "".join(parameter.packing for parameter in source.parameters.values()))
        self._launch = getattr(ctypes.CDLL(str(library)), _LAUNCH)
        buffers = [ctypes.c_char_p] * 3
        self._launch.argtypes = [*buffers, ctypes.c_size_t, ctypes.c_uint64, ctypes.POINTER(_Stacks), ctypes.c_int]
        self._launch.restype = ctypes.POINTER(Fault)
        variables = shared_variables(library)
        self._shared = [Memory(f"shared variable {variable.name}", variable.nbytes) for variable in variables]
        # A region starts at the offset until the library, which knows from where on, has placed it.
        self._shared_regions = b"".join(
            _REGION.pack(variable.offset % 2**64, variable.nbytes, 1) for variable in variables
        )

    def launch(
        self, grid: Sequence[int], block: Sequence[int], shared: int, arguments: Sequence[Any], seed: int
    ) -> None:
        """Runs it to the end.

        Args:
            grid, block: three sizes each.
            shared: bytes of dynamic shared memory.
            arguments: arrays, numbers and None, of the parameters' types.
            seed: see `Emulation.seed`.

        Raises:
            KernelFaultError: the kernel broke a rule of CUDA, or crashed.
            KeyboardInterrupt: there was an interrupt from the keyboard.
        """
        given = arguments
        if self._copies:  # each in memory of its own, so that AddressSanitizer knows where it ends
            given = [argument.copy() if isinstance(argument, np.ndarray) else argument for argument in arguments]
        self._run(grid, block, shared, given, seed)
        for argument, used in zip(arguments, given, strict=True):
            if used is not argument and argument.flags.writeable:
                argument[...] = used

    def _run(self, grid: Sequence[int], block: Sequence[int], shared: int, given: Sequence[Any], seed: int) -> None:
        arrays = {
            name: argument
            for name, argument in zip(self._source.parameters, given, strict=True)
            if isinstance(argument, np.ndarray)
        }
        own = [_REGION.pack(array.ctypes.data, array.nbytes, 0) for array in arrays.values()]
        regions = b"".join([*own, self._shared_regions, _REGION.pack(0, shared, 1)])
        values = self._values.pack(*(_value(argument) for argument in given))
        sizes = struct.pack("@6I", *grid, *block)
        with _LAUNCHING:
            count = len(regions) // _REGION.size
            fault = self._launch(sizes, values, regions, count, seed, _STACKS, _is_interruptible())
            if fault:
                named = [Memory(f"argument {name}", array.nbytes, array.itemsize) for name, array in arrays.items()]
                memories = [*named, *self._shared, Memory("the dynamic shared memory", shared)]
                raise error_of(fault.contents, self._source.name, self._library, memories)


def _value(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return 0 if argument is None else argument


def _is_interruptible() -> bool:
    """Whether an interrupt from the keyboard would raise KeyboardInterrupt in this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
