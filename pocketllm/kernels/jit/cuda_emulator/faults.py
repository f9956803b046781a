"""What a kernel did wrong, as the emulator noted it down, told in words."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.kernels.jit.cuda_emulator.tools import output_of


class KernelFaultError(PocketLLMError):
    """A kernel broke a rule of CUDA; the message names it, the line, the block and the thread."""


class Dim3(ctypes.Structure):
    """``dim3`` of runtime.hpp."""

    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Site(ctypes.Structure):
    """``Site`` of runtime.hpp."""

    _fields_ = [("file", ctypes.c_char_p), ("line", ctypes.c_int), ("instruction", ctypes.c_size_t)]


class Actor(ctypes.Structure):
    """``Actor`` of runtime.hpp."""

    _fields_ = [("block", Dim3), ("thread", Dim3), ("site", Site), ("writes", ctypes.c_int)]

    def __str__(self) -> str:
        return f"thread {self.thread} of block {self.block}"


class Fault(ctypes.Structure):
    """``Fault`` of runtime.hpp."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("mask", ctypes.c_uint),
        ("lane", ctypes.c_int),
        ("region", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("address", ctypes.c_uint64),
        ("first", Actor),
        ("second", Actor),
    ]


_KINDS = (
    *("none", "memory", "barrier", "lane_missing", "lane_outside", "source_outside", "bounds", "race", "misaligned"),
    *("nowhere", "width", "distance", "crash", "stack", "interrupt"),
)
"""``FaultKind`` of runtime.hpp."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a message says of a region of memory.

    Attributes:
        name: such as ``argument x``.
        nbytes, itemsize: in bytes.
    """

    name: str
    nbytes: int
    itemsize: int = 1


def error_of(fault: Fault, kernel: str, library: Path, memories: Sequence[Memory]) -> BaseException:
    """The exception that tells of a fault in that kernel; `memories` in the order of the launch's regions."""
    kind = _KINDS[fault.kind]
    if kind == "interrupt":
        return KeyboardInterrupt()
    if kind == "memory":
        return MemoryError(f"kernel {kernel}: the emulator has no memory for its threads and what it notes of accesses")
    story = _TELL[kind](fault, library, memories)
    return KernelFaultError(f"kernel {kernel}, {_place(fault.first, library)}: {fault.first} {story}")


def _barrier(fault: Fault, library: Path, _: Sequence[Memory]) -> str:
    return (
        f"waits at a barrier, but thread {fault.second.thread} {_elsewhere(fault.second, library)}; every thread of a "
        "block has to reach the same __syncthreads()"
    )


def _lane_missing(fault: Fault, library: Path, _: Sequence[Memory]) -> str:
    return (
        f"waits in a warp operation with mask {fault.mask:#x} for lane {fault.lane}, but that "
        f"{_elsewhere(fault.second, library)}; all lanes of a mask have to be there and take part with that mask"
    )


def _lane_outside(fault: Fault, _: Path, __: Sequence[Memory]) -> str:
    return f"takes part in a warp operation with mask {fault.mask:#x}, which leaves out its own lane {fault.lane}"


def _source_outside(fault: Fault, _: Path, __: Sequence[Memory]) -> str:
    return f"reads lane {fault.lane}, which the mask {fault.mask:#x} of the shuffle leaves out"


def _width(fault: Fault, _: Path, __: Sequence[Memory]) -> str:
    return f"shuffles in groups of {fault.lane} lanes; CUDA has groups of 1, 2, 4, 8, 16 and 32"


def _distance(fault: Fault, _: Path, __: Sequence[Memory]) -> str:
    return f"shuffles with a lane {fault.lane} away; CUDA has distances and lane masks from 0 to 31"


def _nowhere(fault: Fault, _: Path, __: Sequence[Memory]) -> str:
    verb = "writes" if fault.first.writes else "reads"
    return (
        f"{verb} {fault.bytes} bytes at {fault.address:#x}, an address that belongs to no argument and no shared memory"
    )


def _stack(_: Fault, __: Path, ___: Sequence[Memory]) -> str:
    return "leaves its stack: a function calls itself too often, or an index lies outside of a local array"


_CRASHES = {
    signal.SIGFPE: "divides an integer by zero, or the least one by -1",
    signal.SIGILL: "comes upon an instruction that is none: a trap, or code that cannot be reached",
    signal.SIGABRT: "gives up: an assertion failed, or it called abort",
}


def _crash(fault: Fault, _: Path, __: Sequence[Memory]) -> str:
    number = signal.Signals(fault.signal)
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return (
            f"reads or writes where there is no memory, or memory that is not aligned ({number.name}); the emulator's "
            "checked build tells of which array"
        )
    return f"{_CRASHES[number]} ({number.name})"


def _bounds(fault: Fault, _: Path, memories: Sequence[Memory]) -> str:
    memory = memories[fault.region]
    verb = "writes" if fault.first.writes else "reads"
    side = "before the start" if fault.offset < 0 else "past the end"
    return (
        f"{verb} {fault.bytes} bytes {side} of {memory.name}, at {_element(fault.offset, memory)} of "
        f"{memory.nbytes // memory.itemsize}"
    )


def _race(fault: Fault, library: Path, memories: Sequence[Memory]) -> str:
    memory, second = memories[fault.region], fault.second
    now, before = ("writes" if fault.first.writes else "reads"), ("written" if second.writes else "read")
    return (
        f"{now} {_element(fault.offset, memory)} of {memory.name}, which {second} has {before} at "
        f"{_place(second, library)}, with nothing that orders the two"
    )


def _misaligned(fault: Fault, _: Path, memories: Sequence[Memory]) -> str:
    verb = "writes" if fault.first.writes else "reads"
    return (
        f"{verb} {fault.bytes} bytes at once at byte {fault.offset} of {memories[fault.region].name}, "
        f"which is no multiple of {fault.bytes} bytes in memory"
    )


_TELL = {
    "barrier": _barrier,
    "lane_missing": _lane_missing,
    "lane_outside": _lane_outside,
    "source_outside": _source_outside,
    "bounds": _bounds,
    "race": _race,
    "misaligned": _misaligned,
    "nowhere": _nowhere,
    "width": _width,
    "distance": _distance,
    "crash": _crash,
    "stack": _stack,
}


def _element(offset: int, memory: Memory) -> str:
    return f"byte {offset}" if memory.itemsize == 1 else f"element {offset // memory.itemsize}"


def _elsewhere(actor: Actor, library: Path) -> str:
    if actor.site.file is None and actor.site.instruction == 0:
        return "has returned or does not exist"
    return f"waits at {_place(actor, library)}"


def _place(actor: Actor, library: Path) -> str:
    """File and line, such as ``rms_norm/impl_cupy.cu:31``."""
    if actor.site.file is not None:
        return _shown(f"{actor.site.file.decode()}:{actor.site.line}")
    if actor.site.instruction == 0:
        return "in a function that is not of its source"
    return _shown(_line_of(library, actor.site.instruction))


def _shown(place: str) -> str:
    return "/".join(Path(place).parts[-2:])


def _line_of(library: Path, instruction: int) -> str:
    """The line of the kernel's source that an instruction of its library comes from, not of the emulator's."""
    command = ["addr2line", "-i", "-e", str(library), hex(instruction)]
    try:
        listing = output_of(command, "the line is not known")
    except ConfigurationError as error:  # the fault is what has to be told
        return f"instruction {instruction:#x} ({' '.join(str(error).split())})"
    lines = [line.partition(" (")[0] for line in listing.splitlines()]
    return next((line for line in lines if Path(line).parent != _FOLDER), lines[0])


_FOLDER = Path(__file__).resolve().parent
