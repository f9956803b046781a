"""What the CUDA C kernels cost once compiled: registers, spills and shared memory, found without a GPU.

``pocketllm kernels report`` shows it for the sizes that each op is timed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.checking.arrays_cupy import Adapter, as_stored
from pocketllm.kernels.checking.comparison import in_storage
from pocketllm.kernels.contract import OpCall, OpSpec
from pocketllm.kernels.jit.cuda_source import KernelSource
from pocketllm.kernels.jit.loading_cupy import compile_cubin, nvrtc
from pocketllm.kernels.jit.toolchain_cupy import recorded_requests
from pocketllm.kernels.registry import backends_of, implementation, op_names, spec

nvrtc()  # as `import` would do it: where it is missing, whoever imports this module learns why

CAPABILITIES = (75, 80, 90, 100, 120)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one block of a compiled kernel takes.

    Attributes:
        registers: of each thread.
        spilled: bytes of each thread that went to memory for want of registers, stores and loads.
        shared: bytes of shared memory, what a launch adds left out.
    """

    registers: int
    spilled: int
    shared: int


def resources_of(source: KernelSource, architecture: str) -> Resources:
    """Compiles a kernel for an architecture such as ``sm_90``, which need not be there."""
    log = compile_cubin(source, architecture).log
    registers = re.findall(r"Used (\d+) registers", log)
    if not registers:
        raise ValueError(f"{source.name}: the assembler said nothing of registers:\n{log}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    shared = re.findall(r"(\d+) bytes smem", log)
    return Resources(max(map(int, registers)), sum(map(int, spills)), max(map(int, shared), default=0))


def table_row(source: KernelSource, architecture: str) -> dict[str, Any]:
    """A line of the report on compiled kernels, as plain values."""
    resources = resources_of(source, architecture)
    return {
        "architecture": architecture,
        "kernel": source.name.partition("<")[0],
        "variant": source.name.partition("<")[2].removesuffix(">"),
        "registers": resources.registers,
        "spilled": resources.spilled,
        "shared": resources.shared,
    }


def ops() -> tuple[str, ...]:
    """The ops that have kernels in CUDA C."""
    return tuple(op for op in op_names() if "cupy" in backends_of(op))


def timed_kernels(op: str) -> tuple[KernelSource, ...]:
    """The kernels that an op asks for at its timed sizes, in every dtype."""
    contract = spec(op)
    with recorded_requests() as requests:
        for shape in contract.bench:
            _bind(contract, shape.dims)
    return tuple({kernel.name: kernel.source for kernel in requests}.values())


def _bind(contract: OpSpec, dims: Mapping[str, int]) -> None:
    """On the host and without asking what it has: nothing runs, so that neither a GPU nor an emulator is needed."""
    drawn = contract.make_case(np.random.default_rng(0), dims)
    operands = {operand.name: operand for operand in contract.operands}
    for mode in Adapter.modes:
        case = in_storage(contract, drawn, mode)
        weights = {
            name: array if isinstance(array, QuantTensor) else as_stored(array, mode.dtype_of(operands[name]))
            for name, array in case.weights.items()
        }
        call = OpCall(case.scalars, weights, device="cpu", dtype=mode.dtype, cache_dtype=mode.cache_dtype)
        implementation(contract.name, "cupy").bind(call)


def rows(of: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A line for each kernel of some ops and each architecture, as they are compiled."""
    for op in of:
        for capability in CAPABILITIES:
            for source in timed_kernels(op):
                yield table_row(source, f"sm_{capability}")
