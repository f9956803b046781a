"""Gated RMSNorm in CUDA C: one warp a row, whatever the number of rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_WARPS = 4


@cache
def _kernel(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"gated_rms_norm<{c_type(dtype)}, {_WARPS}>",
        x=readonly(dtype),
        gate=readonly(dtype),
        weight=readonly("float32"),
        out=array(dtype),
        rows=scalar("int32"),
        n=scalar("int32"),
        eps=scalar("float32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Statistics and gate in float32 whatever the activation dtype, one rounding at the end."""
    kernel, arrays = _kernel(call.device, call.dtype).request(), array_module(call.device)
    weight, eps = call.weights["weight"], call.scalars.eps
    n = weight.size

    def gated_rms_norm(x: Array, gate: Array, out: Array | None = None) -> Array:
        out = arrays.empty_like(x) if out is None else out
        rows = x.size // n
        kernel([-(-rows // _WARPS)], [32 * _WARPS], x, gate, weight, out, rows, n, eps)
        return out

    return gated_rms_norm
