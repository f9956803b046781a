"""Linear layer over a block-quantised weight in Numba: vectors over eight outputs, tiles of four rows.

An output is computed by the same operations in the same order whether its row stands alone or in a tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.int8_numba import dot, dot_small, high_nibbles, low_nibbles, splat_i32, to_f32
from pocketllm.kernels.interleaved import GROUP, PACKINGS, Packing, interleaved
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.output_numba import padded_bias, store_outputs
from pocketllm.kernels.quantized_linear.activations_numba import quantize_row
from pocketllm.kernels.simd_numba import (
    add,
    broadcast,
    fma,
    load_f32,
    load_halves,
    load_singles,
    load_u8,
    mul,
)

ALONE = 1 << 21
"""Products below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Block-quantised weights in any layout, float32 activations."""
    weight = call.weights["weight"]
    if not isinstance(weight, QuantTensor) or weight.format not in PACKINGS:
        return f"the weight is not in one of the formats {', '.join(PACKINGS)}"
    return None


def bind(call: OpCall) -> BoundOp:
    """Repacks the weight where it is not interleaved yet, and fixes the kernel of its packing."""
    weight = interleaved(call.weights["weight"])
    kernel = _kernel(PACKINGS[weight.format]).request()
    data, outputs = weight.data, weight.shape[0]
    bias = padded_bias(call.weights.get("bias"), len(data))

    def quantized_linear(x: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        out = np.empty((len(x), outputs), dtype=np.float32) if out is None else out
        kernel(x, data, bias, out)
        return out

    return quantized_linear


@cache
def _kernel(packing: Packing) -> Kernel:
    """The kernel for weights packed like that; the packing is a constant in it."""

    def quantized_linear(x: Any, data: Any, bias: Any, out: Any) -> None:
        rows, columns = x.shape
        codes = np.empty((rows, columns), np.int8)
        scales = np.empty((rows, columns // 32), np.float32)
        sums = np.empty((rows, columns // 16), np.int32)
        if rows * columns * len(data) * GROUP < ALONE:
            for row in range(rows):
                quantize_row(x, row, codes, scales, sums)
            for group in range(len(data)):
                _outputs(packing, data, group, (codes, scales, sums), bias, out)
        else:
            for row in prange(rows):
                quantize_row(x, np.int64(row), codes, scales, sums)
            for group in prange(len(data)):
                _outputs(packing, data, np.int64(group), (codes, scales, sums), bias, out)

    matrix, vector = readonly(types.float32, 2), readonly(types.float32, 1)
    return Kernel(quantized_linear, matrix, readonly(types.uint8, 2), vector, array(types.float32, 2), parallel=True)


@device
def _outputs(packing: Any, data: Any, group: Any, activations: Any, bias: Any, out: Any) -> None:
    """Eight outputs of every row."""
    rows = len(out)
    addend = load_f32(bias, group * GROUP)
    row = 0
    while row + 4 <= rows:
        y0, y1, y2, y3 = _four_rows(packing, data, group, activations, row)
        store_outputs(out, row, group, add(y0, addend))
        store_outputs(out, row + 1, group, add(y1, addend))
        store_outputs(out, row + 2, group, add(y2, addend))
        store_outputs(out, row + 3, group, add(y3, addend))
        row += 4
    while row < rows:
        store_outputs(out, row, group, add(_one_row(packing, data, group, activations, row), addend))
        row += 1


@device
def _four_rows(packing: Any, data: Any, group: Any, activations: Any, row: Any) -> Any:
    y0 = y1 = y2 = y3 = broadcast(np.float32(0.0))
    m0 = m1 = m2 = m3 = broadcast(np.float32(0.0))
    start = group * data.shape[1]
    for block in range(activations[1].shape[1]):
        at = start + block * packing.block_bytes
        scales, minima, codes = _load_block(packing, data, at)
        y0 = _add_products(packing, y0, scales, codes, activations, row, block)
        y1 = _add_products(packing, y1, scales, codes, activations, row + 1, block)
        y2 = _add_products(packing, y2, scales, codes, activations, row + 2, block)
        y3 = _add_products(packing, y3, scales, codes, activations, row + 3, block)
        if packing.minima:
            m0 = _add_minima(packing, m0, minima, activations, row, block)
            m1 = _add_minima(packing, m1, minima, activations, row + 1, block)
            m2 = _add_minima(packing, m2, minima, activations, row + 2, block)
            m3 = _add_minima(packing, m3, minima, activations, row + 3, block)
    return add(y0, m0), add(y1, m1), add(y2, m2), add(y3, m3)


@device
def _one_row(packing: Any, data: Any, group: Any, activations: Any, row: Any) -> Any:
    y = m = broadcast(np.float32(0.0))
    start = group * data.shape[1]
    for block in range(activations[1].shape[1]):
        scales, minima, codes = _load_block(packing, data, start + block * packing.block_bytes)
        y = _add_products(packing, y, scales, codes, activations, row, block)
        if packing.minima:
            m = _add_minima(packing, m, minima, activations, row, block)
    return add(y, m)


@device
def _load_block(packing: Any, data: Any, at: Any) -> Any:
    """Scales and minima of one or two parts, and codes, 4 columns a vector, of eight rows by 32 columns."""
    size = packing.scale_bytes
    scales = _load_parts(packing, data, at)
    minima = scales
    if packing.minima:
        minima = _load_parts(packing, data, at + size * packing.parts)
    at += packing.codes_at
    v0, v1, v2, v3 = load_u8(data, at), load_u8(data, at + 32), load_u8(data, at + 64), load_u8(data, at + 96)
    if packing.nibbles:
        low = low_nibbles(v0), low_nibbles(v1), low_nibbles(v2), low_nibbles(v3)
        return scales, minima, (low, (high_nibbles(v0), high_nibbles(v1), high_nibbles(v2), high_nibbles(v3)))
    at += 128
    rest = load_u8(data, at), load_u8(data, at + 32), load_u8(data, at + 64), load_u8(data, at + 96)
    return scales, minima, ((v0, v1, v2, v3), rest)


@device
def _load_parts(packing: Any, data: Any, at: Any) -> Any:
    """Eight numbers for each of the parts; the first ones twice where there is one part."""
    second = at + packing.scale_bytes * (packing.parts - 1)
    if packing.half:
        return load_halves(data, at), load_halves(data, second)
    return load_singles(data, at), load_singles(data, second)


@device
def _add_products(packing: Any, y: Any, scales: Any, codes: Any, activations: Any, row: Any, block: Any) -> Any:
    """One fused multiply-add for each part."""
    values, value_scales, sums = activations
    at = row * values.shape[1] + block * 32
    value_scale = broadcast(value_scales[row, block])
    first, second = sums[row, 2 * block], sums[row, 2 * block + 1]
    if packing.parts == 1:
        total = _dot(packing, splat_i32(np.int32(-packing.offset * (first + second))), codes[0], values, at)
        total = _dot(packing, total, codes[1], values, at + 16)
        return fma(mul(scales[0], value_scale), to_f32(total), y)
    total = _dot(packing, splat_i32(np.int32(-packing.offset * first)), codes[0], values, at)
    y = fma(mul(scales[0], value_scale), to_f32(total), y)
    total = _dot(packing, splat_i32(np.int32(-packing.offset * second)), codes[1], values, at + 16)
    return fma(mul(scales[1], value_scale), to_f32(total), y)


@device
def _dot(packing: Any, total: Any, codes: Any, values: Any, at: Any) -> Any:
    if packing.narrow:
        return dot_small(total, codes, values, at)
    return dot(total, codes, values, at)


@device
def _add_minima(packing: Any, m: Any, minima: Any, activations: Any, row: Any, block: Any) -> Any:
    """One fused multiply-add for each part."""
    _, value_scales, sums = activations
    value_scale, first, second = value_scales[row, block], sums[row, 2 * block], sums[row, 2 * block + 1]
    if packing.parts == 1:
        return fma(minima[0], broadcast(value_scale * np.float32(first + second)), m)
    m = fma(minima[0], broadcast(value_scale * np.float32(first)), m)
    return fma(minima[1], broadcast(value_scale * np.float32(second)), m)
