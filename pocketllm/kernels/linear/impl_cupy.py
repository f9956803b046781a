"""Linear layer over a float weight in CUDA C: one order of sums, in one kernel for few rows and one for many."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar, storage_dtype
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle
from pocketllm.kernels.products_cupy import THREADS, TILES, Tile, tile_for


@cache
def _kernel(device: str, dtype: str, tile: Tile) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"{tile.kernel}<{c_type(dtype)}, {tile.rows}, {tile.columns}>",
        x=readonly(dtype),
        weight=readonly(dtype),
        bias=readonly("float32", optional=True),
        out=array(dtype),
        rows=scalar("int32"),
        outputs=scalar("int32"),
        inputs=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Weights as arrays in the activation dtype."""
    weight = call.weights["weight"]
    if isinstance(weight, QuantTensor):
        return f"the weight is in format {weight.format}: expand it to an array when it is loaded"
    if weight.dtype != storage_dtype(call.dtype):
        return f"the weight is an array of {weight.dtype}, not of {storage_dtype(call.dtype)} as activations are"
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Products and sums in float32 whatever the activation dtype, one rounding at the end."""
    weight, bias = call.weights["weight"], call.weights.get("bias")
    outputs, inputs = weight.shape
    arrays = array_module(call.device)
    kernels = {tile: _kernel(call.device, call.dtype, tile).request() for tile in TILES}

    def linear(x: Array, out: Array | None = None) -> Array:
        rows = len(x)
        out = arrays.empty((rows, outputs), x.dtype) if out is None else out
        tile = tile_for(rows)
        kernels[tile](tile.grid(rows, outputs), [THREADS], x, weight, bias, out, rows, outputs, inputs)
        return out

    return linear
