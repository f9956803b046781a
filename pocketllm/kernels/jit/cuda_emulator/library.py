"""An emulated kernel, loaded: which memory of its own it has, and its launch."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pocketllm.kernels.jit.cuda_emulator.faults import Fault, Memory, error_of
from pocketllm.kernels.jit.cuda_emulator.settings import Build
from pocketllm.kernels.jit.cuda_source import KernelSource

_REGION = struct.Struct("@QNi4x")
"""``Region`` of runtime.hpp."""

_LAUNCH = "emulator_launch"


class EmulatedKernel:
    """A kernel in a library that `compile_library` made. Launches take turns."""

    def __init__(self, source: KernelSource, library: Path, build: Build) -> None:
        self._source = source
        self._library = library
        self._copies = build == "address"
        self._lock = threading.Lock()
        self._values = struct.Struct("@" + "".join(parameter.packing for parameter in source.parameters.values()))
        self._launch = getattr(ctypes.CDLL(str(library)), _LAUNCH)
        self._launch.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
        self._launch.restype = ctypes.POINTER(Fault)
        address = ctypes.cast(self._launch, ctypes.c_void_p).value or 0
        self._shared, self._shared_regions = _shared_variables(library, address)

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
            KernelFaultError: the kernel broke a rule of CUDA.
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
        with self._lock:
            fault = self._launch(sizes, values, regions, len(regions) // _REGION.size, seed)
            if fault:
                named = [Memory(f"argument {name}", array.nbytes, array.itemsize) for name, array in arrays.items()]
                memories = [*named, *self._shared, Memory("the dynamic shared memory", shared)]
                raise error_of(fault.contents, self._source.name, self._library, memories)


def _value(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return 0 if argument is None else argument


def _shared_variables(library: Path, launch_address: int) -> tuple[tuple[Memory, ...], bytes]:
    """A kernel's own shared variables, and their regions: what is static in a function (see cuda.hpp)."""
    command = ["nm", "--demangle", "--print-size", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    symbols = [fields for line in done.stdout.splitlines() if len(fields := line.split(maxsplit=3)) == 4]
    base = next(launch_address - int(start, 16) for start, _, _, symbol in symbols if symbol == _LAUNCH)
    memories, regions = [], b""
    for start, size, kind, symbol in symbols:
        if kind in "bBdD" and ")::" in symbol and not symbol.startswith("emulator::"):
            memories.append(Memory(f"shared variable {symbol.rpartition('::')[2]}", int(size, 16)))
            regions += _REGION.pack(base + int(start, 16), int(size, 16), 1)
    return tuple(memories), regions
