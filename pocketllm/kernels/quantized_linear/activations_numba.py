"""Activations rounded to int8 in Numba: codes, scales and sums of codes of one row."""

from __future__ import annotations

from typing import Any

import numpy as np

from pocketllm.kernels.int8_numba import round_to_code, store_codes
from pocketllm.kernels.jit.toolchain_numba import device
from pocketllm.kernels.simd_numba import (
    add,
    broadcast,
    div,
    fma,
    lane,
    load_f32,
    maximum,
    sub,
    sum_lanes,
)


@device
def _largest(vector: Any) -> Any:
    largest = lane(vector, 0)
    for index in range(1, 8):
        largest = maximum(largest, lane(vector, index))
    return largest


@device
def _scale(x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
    """max |x| / 127 of 32 numbers; NaN where one of them is not finite."""
    zero = broadcast(np.float32(0.0))
    y = maximum(maximum(x0, sub(zero, x0)), maximum(x1, sub(zero, x1)))
    y = maximum(y, maximum(maximum(x2, sub(zero, x2)), maximum(x3, sub(zero, x3))))
    # Zero times a number is zero, or NaN where it is not finite; the maximum may have lost such a one.
    nothing = fma(x3, zero, fma(x2, zero, fma(x1, zero, fma(x0, zero, zero))))
    return _largest(y) / np.float32(127.0) + sum_lanes(nothing)


@device
def quantize_row(x: Any, row: Any, codes: Any, scales: Any, sums: Any) -> None:
    """Row `row` of x [T, K] into codes int8 [T, K], scales float32 [T, K / 32] and sums int32 [T, K / 16].

    `pocketllm.kernels.quantized_linear.spec.quantized_activations` defines codes and scales; a sum is that of 16 codes.
    """
    columns = x.shape[1]
    for block in range(columns // 32):
        at = row * columns + block * 32
        x0, x1, x2, x3 = load_f32(x, at), load_f32(x, at + 8), load_f32(x, at + 16), load_f32(x, at + 24)
        scale = _scale(x0, x1, x2, x3)
        divisor = broadcast(scale if scale > np.float32(0.0) else np.float32(1.0))
        x0, x1 = round_to_code(div(x0, divisor)), round_to_code(div(x1, divisor))
        x2, x3 = round_to_code(div(x2, divisor)), round_to_code(div(x3, divisor))
        store_codes(codes, at, x0)
        store_codes(codes, at + 8, x1)
        store_codes(codes, at + 16, x2)
        store_codes(codes, at + 24, x3)
        scales[row, block] = scale
        sums[row, 2 * block] = np.int32(sum_lanes(add(x0, x1)))
        sums[row, 2 * block + 1] = np.int32(sum_lanes(add(x2, x3)))
