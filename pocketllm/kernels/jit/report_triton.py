"""What the Triton kernels cost once compiled: registers, spills and shared memory, found without a GPU.

``pocketllm kernels report`` shows it for the sizes that each op is timed at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.backends.compiler import GPUTarget

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.contract import OpSpec
from pocketllm.kernels.jit.loading_triton import choose_compiler, will_load_as
from pocketllm.kernels.jit.toolchain_triton import Launch, cuda_target, recorded_launches, table_row
from pocketllm.kernels.registry import BackendOpTable, backends_of, op_names, spec

CAPABILITIES = (80, 90)
DTYPES = ("float32", "bfloat16")


def ops() -> tuple[str, ...]:
    """The ops that have kernels in Triton."""
    return tuple(op for op in op_names() if "triton" in backends_of(op))


def launches_of(contract: OpSpec, dims: Mapping[str, int], dtype: str, target: GPUTarget) -> list[Launch]:
    """What one case of an op launches at these sizes."""
    case = contract.make_case(np.random.default_rng(0), dims)
    dtypes = {operand.name: None if operand.host else _dtype_of(operand.dtype, dtype) for operand in contract.operands}
    weights, arrays = (
        {name: _tensor(array, dtypes[name]) for name, array in part.items()} for part in (case.weights, case.arrays)
    )
    scalars = {field.name: getattr(case.scalars, field.name) for field in dataclasses.fields(case.scalars)}
    with recorded_launches(target) as launches:
        BackendOpTable("triton", device="cpu", dtype=dtype).bind(contract.name, weights, **scalars)(**arrays)
    return launches


def _dtype_of(named: str, dtype: str) -> str:
    return dtype if named in ("activation", "weight", "cache") else named


def _tensor(array: npt.NDArray[Any], dtype: str | None) -> Any:
    return array if dtype is None else torch.tensor(array, dtype=getattr(torch, dtype))


def distinct(launches: Iterable[Launch]) -> tuple[Launch, ...]:
    """One launch of each specialisation."""
    return tuple({launch.key: launch for launch in launches}.values())


def timed_launches(op: str, target: GPUTarget) -> tuple[Launch, ...]:
    """The specialisations that an op's timed sizes need, in both activation dtypes."""
    contract = spec(op)
    shapes = ((shape.dims, dtype) for shape in contract.bench for dtype in DTYPES)
    return distinct(launch for dims, dtype in shapes for launch in launches_of(contract, dims, dtype, target))


def rows(of: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A line for each specialisation of the kernels of some ops, as they are compiled.

    Raises:
        UnsupportedFeatureError: this process has Triton as an interpreter.
    """
    if will_load_as() == "interpreter":
        raise UnsupportedFeatureError(
            "this process interprets Triton's kernels and cannot compile them: start anew without TRITON_INTERPRET in "
            "the environment"
        )
    choose_compiler()
    for op in of:
        for target in map(cuda_target, CAPABILITIES):
            for launch in timed_launches(op, target):
                yield table_row(launch, target)
