"""Linear layer over a float weight in Numba: one fused multiply-add for each k, in ascending order, to each output."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.interleaved import LAYOUT, interleaved, interleaved_array
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.output_numba import padded_bias, store_outputs
from pocketllm.kernels.simd_numba import LANES, add, broadcast, fma, load_f32, splat_f32

ALONE = 1 << 17
"""Products below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Weights of floating-point numbers, as arrays or as a checkpoint stores them."""
    weight = call.weights["weight"]
    if isinstance(weight, QuantTensor):
        if weight.format in ("F32", "F16", "BF16"):
            return None
        return f"a weight in format {weight.format} is served by 'quantized_linear'"
    return None if weight.dtype.kind == "f" else f"a weight of {weight.dtype} is none of floating-point numbers"


def bind(call: OpCall) -> BoundOp:
    """The weight in float32, interleaved; one that is interleaved already is taken as it is."""
    weight = call.weights["weight"]
    packed = interleaved(weight) if isinstance(weight, QuantTensor) else interleaved_array(weight)
    assert packed.layout == LAYOUT
    outputs, columns = packed.shape
    data = packed.data.view(np.float32).reshape(-1, columns, LANES)
    bias = padded_bias(call.weights.get("bias"), len(data))
    kernel = KERNEL.request()

    def linear(x: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        out = np.empty((len(x), outputs), dtype=np.float32) if out is None else out
        kernel(x, data, bias, out)
        return out

    return linear


def _linear(x: Any, data: Any, bias: Any, out: Any) -> None:
    if x.shape[0] * data.size < ALONE:
        for group in range(len(data)):
            _outputs(x, data, group, bias, out)
    else:
        for group in prange(len(data)):
            _outputs(x, data, np.int64(group), bias, out)


@device
def _outputs(x: Any, data: Any, group: Any, bias: Any, out: Any) -> None:
    """Eight outputs of every row, in tiles of four rows."""
    rows, columns = x.shape
    addend = load_f32(bias, group * LANES)
    start = group * columns * LANES
    row = 0
    while row + 4 <= rows:
        y0 = y1 = y2 = y3 = broadcast(np.float32(0.0))
        at = row * columns
        for k in range(columns):
            weight = load_f32(data, start + k * LANES)
            y0 = fma(weight, splat_f32(x, at + k), y0)
            y1 = fma(weight, splat_f32(x, at + columns + k), y1)
            y2 = fma(weight, splat_f32(x, at + 2 * columns + k), y2)
            y3 = fma(weight, splat_f32(x, at + 3 * columns + k), y3)
        store_outputs(out, row, group, add(y0, addend))
        store_outputs(out, row + 1, group, add(y1, addend))
        store_outputs(out, row + 2, group, add(y2, addend))
        store_outputs(out, row + 3, group, add(y3, addend))
        row += 4
    while row < rows:
        y = broadcast(np.float32(0.0))
        for k in range(columns):
            y = fma(load_f32(data, start + k * LANES), splat_f32(x, row * columns + k), y)
        store_outputs(out, row, group, add(y, addend))
        row += 1


KERNEL = Kernel(
    _linear,
    readonly(types.float32, 2),
    readonly(types.float32, 3),
    readonly(types.float32, 1),
    array(types.float32, 2),
    parallel=True,
)
