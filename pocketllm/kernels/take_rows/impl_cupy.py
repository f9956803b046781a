"""Selection of rows in CUDA C."""

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
        f"take_rows<{c_type(dtype)}>",
        x=readonly(dtype),
        rows=readonly("int64"),
        out=array(dtype),
        n=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel, arrays = _kernel(call.device, call.dtype).request(), array_module(call.device)

    def take_rows(x: Array, rows: Array, out: Array | None = None) -> Array:
        n = x.shape[1]
        out = arrays.empty((len(rows), n), x.dtype) if out is None else out
        kernel([len(rows), -(-n // _THREADS)], [_THREADS], x, rows, out, n)
        return out

    return take_rows
