"""Addition in place in CUDA C."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, obstacle

_THREADS = 256


@cache
def _kernel(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"add<{c_type(dtype)}>",
        residual=array(dtype),
        x=readonly(dtype),
        n=scalar("int64"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel = _kernel(call.device, call.dtype).request()

    def add(residual: Array, x: Array) -> None:
        kernel([-(-residual.size // _THREADS)], [_THREADS], residual, x, residual.size)

    return add
