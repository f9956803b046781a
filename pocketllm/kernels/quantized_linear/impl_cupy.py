"""Linear layer over a block-quantised weight in CUDA C: one order of sums, one kernel for few rows and one for many."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle
from pocketllm.kernels.products_cupy import THREADS, TILES, Tile, tile_for
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES
from pocketllm.kernels.quantized_linear.spec import BLOCK

_SOURCE = Path(__file__).with_suffix(".cu")
_WORD = 4
"""Codes of activations lie by fours."""
_SUMMED = 16
"""Codes of activations that a sum is of."""


@cache
def _quantize(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"quantize<{c_type(dtype)}>",
        x=readonly(dtype),
        codes=array("int32"),
        scales=array("float32"),
        sums=array("int32"),
        count=scalar("int32"),
    )


@cache
def _product(device: str, dtype: str, format: str, tile: Tile) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"{tile.kernel}<{format}, {c_type(dtype)}, {tile.rows}, {tile.columns}>",
        codes=readonly("int32"),
        scales=readonly("float32"),
        sums=readonly("int32"),
        weight=readonly("uint8"),
        bias=readonly("float32", optional=True),
        out=array(dtype),
        rows=scalar("int32"),
        outputs=scalar("int32"),
        inputs=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Weights in a format with codes, as a checkpoint stores them."""
    weight = call.weights["weight"]
    if not isinstance(weight, QuantTensor) or weight.format not in FORMATS_WITH_CODES:
        return f"the weight is not in one of the formats {', '.join(FORMATS_WITH_CODES)}"
    if weight.layout != "rows":
        return f"the weight has been repacked to layout {weight.layout!r}; the kernels read rows"
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Fixes the kernels of the weight's format; the weight stays as it is."""
    weight, bias = call.weights["weight"], call.weights.get("bias")
    outputs, inputs = weight.shape
    arrays, data = array_module(call.device), weight.data
    quantize = _quantize(call.device, call.dtype).request()
    products = {tile: _product(call.device, call.dtype, weight.format, tile).request() for tile in TILES}

    def quantized_linear(x: Array, out: Array | None = None) -> Array:
        rows = len(x)
        out = arrays.empty((rows, outputs), x.dtype) if out is None else out
        codes = arrays.empty(x.size // _WORD, "int32")
        scales = arrays.empty(x.size // BLOCK, "float32")
        sums = arrays.empty(x.size // _SUMMED, "int32")
        quantize([-(-codes.size // THREADS)], [THREADS], x, codes, scales, sums, codes.size)
        tile = tile_for(rows)
        products[tile](tile.grid(rows, outputs), [THREADS], codes, scales, sums, data, bias, out, rows, outputs, inputs)
        return out

    return quantized_linear
