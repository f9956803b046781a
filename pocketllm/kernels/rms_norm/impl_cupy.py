"""RMSNorm in CUDA C: one block a row, whatever the number of rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_THREADS = 128


@cache
def _kernel(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"rms_norm<{c_type(dtype)}, {_THREADS}>",
        x=readonly(dtype),
        residual=array(dtype, optional=True),
        weight=readonly("float32"),
        out=array(dtype),
        n=scalar("int32"),
        eps=scalar("float32"),
        offset=scalar("float32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Statistics in float32 whatever the activation dtype, one rounding at the end."""
    kernel, arrays = _kernel(call.device, call.dtype).request(), array_module(call.device)
    weight, s = call.weights["weight"], call.scalars
    n = weight.size

    def rms_norm(x: Array, residual: Array | None = None, out: Array | None = None) -> Array:
        out = arrays.empty_like(x) if out is None else out
        kernel([x.size // n], [_THREADS], x, residual, weight, out, n, s.eps, s.weight_offset)
        return out

    return rms_norm
