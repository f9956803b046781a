"""SwiGLU in CUDA C."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_THREADS = 256


@cache
def _kernel(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"swiglu<{c_type(dtype)}>",
        gate=readonly(dtype),
        up=readonly(dtype),
        out=array(dtype),
        n=scalar("int64"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel, arrays = _kernel(call.device, call.dtype).request(), array_module(call.device)

    def swiglu(gate: Array, up: Array, out: Array | None = None) -> Array:
        out = arrays.empty_like(gate) if out is None else out
        kernel([-(-gate.size // _THREADS)], [_THREADS], gate, up, out, gate.size)
        return out

    return swiglu
