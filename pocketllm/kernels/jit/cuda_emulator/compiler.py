"""g++ as the compiler of emulated kernels: its flags, what tells its versions apart, and one build."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.cuda_emulator.settings import Build
from pocketllm.kernels.jit.cuda_emulator.shared_variables import GAP, refuse_other_variables, spread
from pocketllm.kernels.jit.cuda_emulator.tools import output_of
from pocketllm.kernels.jit.sources import digest

FOLDER = Path(__file__).resolve().parent
SOURCES = tuple(sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".hpp")))
"""The emulator's own, part of every kernel's code."""

_LINKED = ("runtime.cpp", "signals.cpp")
"""Those that are part of every build."""

_MOST_FRAME_BYTES = 128 << 10
"""Of one function's locals; stacks and what guards their ends are sized for it (stacks.hpp)."""

_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-gnu-unique",  # libraries made of one template would share its variables
    "-ffp-contract=off",  # arithmetic as written, as on the GPU
    "-g1",  # lines, for reports
    "-gdwarf-4",  # of version 5 addr2line takes the files amiss
)
_COPIES = ("memcpy", "memmove", "memset")
"""Functions of which checker.cpp has its own, see cuda.hpp."""

_BUILD_FLAGS: dict[Build, tuple[str, ...]] = {
    "plain": ("-O2",),
    "checked": ("-O1", "-DEMULATOR_CHECKED"),
    "address": ("-O1", "-fsanitize=address", "-fno-omit-frame-pointer"),
}
_KERNEL_FLAGS: dict[Build, tuple[str, ...]] = {
    "plain": (),
    # Functions of this name are called before each access to memory; checker.cpp has them, not the compiler's library.
    # Without scalar replacement a vector is read at once, as on a GPU, which is what its alignment is for.
    "checked": ("-fsanitize=thread", "-fno-tree-sra", *(f"-fno-builtin-{name}" for name in _COPIES)),
    "address": (),
}


def obstacle() -> str | None:
    """Why kernels cannot be compiled here; None where they can."""
    if shutil.which("g++") is None:
        return "without a GPU its kernels are compiled by g++, which is not installed: install GCC 9 or later"
    return None


@cache
def version() -> str:
    """The compiler's version and target, and the processor's features that it uses."""
    complaint = obstacle()
    if complaint is not None:
        raise ConfigurationError(complaint)
    told = output_of(
        ["g++", "-dumpfullversion", "-dumpmachine"], "g++, which compiles kernels, does not tell its version"
    )
    return " ".join(["g++", *told.split(), *_processor_flags()])


@cache
def _processor_flags() -> tuple[str, ...]:
    """Without the instruction, fmaf is a slow function; its result is the same."""
    try:
        features = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    return ("-mfma",) if " fma " in features else ()


def common_flags(build: Build) -> tuple[str, ...]:
    """For the emulator's sources and the kernel's."""
    return (*_FLAGS, f"-DEMULATOR_SHARED_GAP={GAP}", *_processor_flags(), *_BUILD_FLAGS[build])


def kernel_flags(build: Build) -> tuple[str, ...]:
    """For the kernel's translation unit, in addition."""
    return (f"-Werror=frame-larger-than={_MOST_FRAME_BYTES}", "-Werror=vla", *_KERNEL_FLAGS[build])


def facts(build: Build) -> tuple[str, ...]:
    """What a library depends on, beside the kernel's source."""
    return digest(SOURCES), version(), f"{common_flags(build)} {kernel_flags(build)}"


def compile_library(unit: str, name: str, include: Path, build: Build, library: Path) -> None:
    """Compiles a kernel's translation unit with the emulator into `library`, which appears whole or not at all.

    Raises:
        ConfigurationError: there is no compiler, or it refuses the code; the message has its own.
    """
    version()
    compile_with = ["g++", *common_flags(build), f"-I{FOLDER}"]
    sources = [FOLDER / source for source in _LINKED + (("checker.cpp",) if build == "checked" else ())]
    failure = f"kernel {name} does not compile for the emulator"
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        folder = Path(scratch)
        (folder / "kernel.cpp").write_text(unit, encoding="utf-8")
        output_of([*compile_with, *kernel_flags(build), f"-I{include}", "-S", "kernel.cpp"], failure, folder)
        assembly = (folder / "kernel.s").read_text(encoding="utf-8")
        (folder / "kernel.s").write_text(spread(assembly), encoding="utf-8")
        output_of(["g++", "-c", "kernel.s"], failure, folder)
        refuse_other_variables(folder / "kernel.o", name)
        output_of([*compile_with, "-shared", "kernel.o", *map(str, sources), "-o", "library.so"], failure, folder)
        os.replace(folder / "library.so", library)
