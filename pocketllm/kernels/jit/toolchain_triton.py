"""Triton as a compiler without a GPU: which kernels a piece of code launches, and what each costs once compiled.

Kernels are found by running ops as usual on arrays of any device, with every launch written down in place of being
made. So a kernel, and each of its specialisations, is known from its use and registered nowhere.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

_OPTIONS = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True, slots=True)
class Launch:
    """A specialisation of a kernel, as the arguments of a launch determine it.

    Attributes:
        function: the kernel.
        name: its op and its own name, such as ``linear:_linear``.
        signature: the type of each argument, such as ``*bf16``, ``i32`` or ``constexpr``.
        constants: the values of the constant arguments, by position.
        attributes: what is known of the others, such as divisibility by 16, by position.
        options: warps, stages and the like.
    """

    function: JITFunction[Any]
    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for launches that share their code."""
        parts = self.signature, sorted(self.constants.items(), key=str), sorted(self.attributes.items()), self.options
        return f"{self.name} {parts}"

    @property
    def variant(self) -> str:
        """Types and constants for a table, such as ``*bf16 i32, BLOCK=1024``."""
        names = list(self.signature)
        types = dict.fromkeys(kind for kind in self.signature.values() if kind != "constexpr")
        constants = [f"{names[at[0]]}={value}" for at, value in self.constants.items() if value is not None]
        return ", ".join([" ".join(types), *constants])


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes.

    Attributes:
        registers: of each thread.
        spilled: bytes of each thread that went to memory for want of registers, stores and loads.
        shared: bytes of shared memory.
    """

    registers: int
    spilled: int
    shared: int


class _AbsentDevice:
    """Stands in for Triton's driver: it names the target and runs nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> GPUTarget:
        # Kernels keep a table for each device, so that none of this reaches a device that exists.
        return self._target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


def cuda_target(capability: int) -> GPUTarget:
    """A GPU of compute capability ``capability / 10``."""
    return GPUTarget("cuda", capability, 32)


@contextlib.contextmanager
def recorded_launches(target: GPUTarget) -> Iterator[list[Launch]]:
    """Within, kernels are not run on this thread; the list receives the launch of each specialisation."""
    launches: list[Launch] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function, attributes = fn.jit_function, compile["configs"][0]
        name = f"{fn.module.removeprefix('pocketllm.kernels.').rpartition('.')[0]}:{function.__name__}"
        options = {option: compile[option] for option in _OPTIONS}
        launches.append(Launch(function, name, compile["signature"], compile["constants"], attributes, options))
        return True  # taken care of: neither compiled nor run

    driver = triton.runtime.driver
    before = driver._active
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        driver.set_active(_AbsentDevice(target))
        try:
            yield launches
        finally:
            driver._active = before


def compile_offline(launch: Launch, target: GPUTarget) -> Resources:
    """Compiles one specialisation down to machine code for `target`, which need not be there."""
    source = ASTSource(
        fn=launch.function, signature=launch.signature, constexprs=launch.constants, attrs=launch.attributes
    )
    log = io.StringIO()
    # The assembler tells of registers and spills; Triton itself learns of them only when a kernel is loaded.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=launch.options)
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    if not registers or not spills:
        raise ValueError(f"{launch.name}: the assembler said nothing of registers and spills:\n{log.getvalue()}")
    return Resources(max(map(int, registers)), sum(map(int, spills)), compiled.metadata.shared)


def table_row(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """A line of the report on compiled kernels, as plain values."""
    resources = compile_offline(launch, target)
    return {
        "architecture": f"sm_{target.arch}",
        "kernel": launch.name,
        "variant": launch.variant,
        "registers": resources.registers,
        "spilled": resources.spilled,
        "shared": resources.shared,
    }
