"""Token embedding in Numba: the rows that are looked up are expanded from the table as it is held."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.interleaved import GROUP, PACKINGS, Packing, interleaved
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import lane, load_halves, load_singles


def supports(call: OpCall) -> str | None:
    """Arrays, and the tensors of a checkpoint in any format that can be interleaved."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the kernel of the table's layout: plain rows, or interleaved, as the head of tied weights needs it."""
    table = call.weights["table"]
    scale = np.float32(call.scalars.scale)
    if isinstance(table, QuantTensor):
        packed = interleaved(table)
        columns = packed.shape[1]
        packing = PACKINGS.get(packed.format)
        kernel = (INTERLEAVED if packing is None else _quantized(packing)).request()
        data = packed.data if packing is not None else packed.data.view(np.float32)
    else:
        data, columns, kernel = np.ascontiguousarray(table, dtype=np.float32), table.shape[1], PLAIN.request()

    def embedding(token_ids: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        out = np.empty((len(token_ids), columns), dtype=np.float32) if out is None else out
        kernel(data, token_ids, scale, out)
        return out

    return embedding


def _plain(data: Any, token_ids: Any, scale: Any, out: Any) -> None:
    for row in range(len(token_ids)):
        for column in range(out.shape[1]):
            out[row, column] = data[token_ids[row], column] * scale


def _interleaved(data: Any, token_ids: Any, scale: Any, out: Any) -> None:
    for row in range(len(token_ids)):
        group, place = divmod(token_ids[row], GROUP)
        for column in range(out.shape[1]):
            out[row, column] = data[group, column * GROUP + place] * scale


_ARGUMENTS = readonly(types.int32, 1), types.float32, array(types.float32, 2)
PLAIN = Kernel(_plain, readonly(types.float32, 2), *_ARGUMENTS)
INTERLEAVED = Kernel(_interleaved, readonly(types.float32, 2), *_ARGUMENTS)


@cache
def _quantized(packing: Packing) -> Kernel:
    def quantized(data: Any, token_ids: Any, scale: Any, out: Any) -> None:
        for row in range(len(token_ids)):
            group, place = divmod(token_ids[row], GROUP)
            for column in range(out.shape[1]):
                out[row, column] = _value(packing, data, group, place, column) * scale

    return Kernel(quantized, readonly(types.uint8, 2), *_ARGUMENTS)


@device
def _value(packing: Any, data: Any, group: Any, place: Any, column: Any) -> Any:
    """One stored number, bit for bit as `pocketllm.checkpoint.quant.dequantize` has it."""
    block, within = divmod(column, 32)
    at = block * packing.block_bytes
    flat = group * data.shape[1] + at
    part = within * packing.parts // 32
    code = np.int32(_code(packing, data, group, at + packing.codes_at, place, within)) - packing.offset
    value = np.float32(code) * _number(packing, data, flat + part * packing.scale_bytes, place)
    if packing.minima:
        value += _number(packing, data, flat + (packing.parts + part) * packing.scale_bytes, place)
    return value


@device
def _code(packing: Any, data: Any, group: Any, at: Any, place: Any, within: Any) -> Any:
    if packing.nibbles:
        half, rest = divmod(within, 16)
        return data[group, at + rest // 4 * 32 + place * 4 + rest % 4] >> np.uint8(4 * half) & np.uint8(15)
    return data[group, at + within // 4 * 32 + place * 4 + within % 4]


@device
def _number(packing: Any, data: Any, at: Any, place: Any) -> Any:
    if packing.half:
        return lane(load_halves(data, at), place)
    return lane(load_singles(data, at), place)
