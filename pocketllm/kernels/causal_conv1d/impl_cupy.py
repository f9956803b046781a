"""The causal convolution in CUDA C: a thread for a channel of a few rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_THREADS = 128

ROWS = 8
"""Of a tile, whose inputs a thread holds: so many are on their way at the same time."""


@cache
def _kernel(device: str, dtype: str, taps: int) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"causal_conv1d<{c_type(dtype)}, {taps}, {ROWS}>",
        x=readonly(dtype),
        state=array("float32"),
        query_start=readonly("int32"),
        state_slot=readonly("int32"),
        save_slot=readonly("int32"),
        weight=readonly("float32"),
        bias=readonly("float32", optional=True),
        out=array(dtype),
        sequences=scalar("int32"),
        channels=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Sums in float32 whatever the activation dtype, one rounding at the end."""
    weight, bias = call.weights["weight"], call.weights.get("bias")
    channels, taps = weight.shape
    kernel, arrays = _kernel(call.device, call.dtype, taps).request(), array_module(call.device)

    def causal_conv1d(
        x: Array,
        state: Array,
        query_start: Array,
        state_slot: Array,
        save_slot: Array,
        out: Array | None = None,
    ) -> Array:
        out = arrays.empty_like(x) if out is None else out
        rows, sequences = len(x), len(state_slot)
        if rows == 0:
            return out
        grid = [rows // ROWS + sequences, -(-channels // _THREADS)]
        batch = query_start, state_slot, save_slot
        kernel(grid, [_THREADS], x, state, *batch, weight, bias, out, sequences, channels)
        return out

    return causal_conv1d
