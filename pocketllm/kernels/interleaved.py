"""The layout ``interleaved8``: weights whose rows stand by eights, so that a vector holds one column of eight outputs.

A float weight is float32 [groups, K, 8]. A quantised one is, for each group of eight rows and each 32 columns:

    scales   [parts, 8]   float16 or float32, one for each 32 / parts columns
    minima   [parts, 8]   likewise, where the format has any
    codes    4 x 32 bytes with two codes each, or 8 x 32 bytes with one

In vector v byte 4 r + j is column 4 v + j of row r; with two codes a byte, the lower one is that, the upper one column
16 + 4 v + j. Rows beyond the last are zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.quant import QuantTensor, dequantize
from pocketllm.kernels.quantized_linear.codes import row_codes

LAYOUT = "interleaved8"
GROUP = 8
BLOCK = 32
_ALIGNMENT = 64
_SLICE_VALUES = 1 << 20


class Packing(NamedTuple):
    """How a block of a format, eight rows by 32 columns, lies in the layout; a tuple, to be a constant in kernels.

    Attributes:
        nibbles: two codes a byte, else one.
        half: scales and minima are float16, else float32.
        parts: groups of columns with a scale of their own, 1 or 2.
        minima: whether there are any.
        offset: subtracted from every code.
        narrow: every code is below 64.
        scale_bytes: of eight scales, or of eight minima.
        codes_at: where the codes begin.
        block_bytes: of the whole.
    """

    nibbles: bool
    half: bool
    parts: int
    minima: bool
    offset: int
    narrow: bool
    scale_bytes: int
    codes_at: int
    block_bytes: int


def _packing(*, nibbles: bool, half: bool, minima: bool, offset: int = 0, parts: int = 1) -> Packing:
    scale_bytes = GROUP * (2 if half else 4)
    codes_at = scale_bytes * parts * (2 if minima else 1)
    block_bytes = codes_at + GROUP * BLOCK // (2 if nibbles else 1)
    return Packing(nibbles, half, parts, minima, offset, offset < 64, scale_bytes, codes_at, block_bytes)


PACKINGS = {
    "Q4_0": _packing(nibbles=True, half=True, minima=False, offset=8),
    "Q4_1": _packing(nibbles=True, half=True, minima=True),
    "Q5_0": _packing(nibbles=False, half=True, minima=False, offset=16),
    "Q5_1": _packing(nibbles=False, half=True, minima=True),
    "Q8_0": _packing(nibbles=False, half=True, minima=False, offset=128),
    "Q4_K": _packing(nibbles=True, half=False, minima=True),
    "Q5_K": _packing(nibbles=False, half=False, minima=True),
    "Q6_K": _packing(nibbles=False, half=False, minima=False, offset=32, parts=2),
}


def interleaved(tensor: QuantTensor) -> QuantTensor:
    """A matrix in this layout: a block-quantised one keeps its codes, any other one becomes float32.

    Rows are taken a slice at a time, so that little memory is used besides the result.
    """
    if tensor.layout == LAYOUT:
        return tensor
    rows, columns = tensor.shape
    groups = -(-rows // GROUP)
    packing = PACKINGS.get(tensor.format)
    width = columns * GROUP * 4 if packing is None else columns // BLOCK * packing.block_bytes
    data = _aligned((groups, width))
    step = max(1, _SLICE_VALUES // (columns * GROUP))
    for start in range(0, groups, step):
        stop = min(start + step, groups)
        some = slice(start * GROUP, min(stop * GROUP, rows))
        data[start:stop] = _float_groups(tensor, some) if packing is None else _code_groups(tensor, some, packing)
    return QuantTensor(data, "F32" if packing is None else tensor.format, tensor.shape, LAYOUT)


def interleaved_array(weight: npt.NDArray[Any]) -> QuantTensor:
    """A float32 matrix in this layout."""
    data = np.ascontiguousarray(weight, dtype=np.float32)
    return interleaved(QuantTensor(data.view(np.uint8), "F32", data.shape))


def _aligned(shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    size = shape[0] * shape[1]
    room = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].reshape(shape)


def _by_groups(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[rows, ...] to [groups, 8, ...]; missing rows are zero."""
    missing = -len(rows) % GROUP
    padded = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows
    return padded.reshape(-1, GROUP, *rows.shape[1:])


def _float_groups(tensor: QuantTensor, rows: slice) -> npt.NDArray[np.uint8]:
    data = tensor.data[rows]
    values = dequantize(QuantTensor(data, tensor.format, (len(data), tensor.shape[1])))
    groups = np.ascontiguousarray(_by_groups(values).swapaxes(1, 2))
    return groups.reshape(len(groups), -1).view(np.uint8)


def _code_groups(tensor: QuantTensor, rows: slice, packing: Packing) -> npt.NDArray[np.uint8]:
    found = row_codes(tensor, rows.start, rows.stop)
    codes = _by_groups(found.codes)
    blocks = codes.shape[2] // BLOCK
    out = np.empty((len(codes), blocks, packing.block_bytes), dtype=np.uint8)
    for place, numbers in enumerate((found.scales, found.minima)):
        if numbers is not None:
            grouped = _by_groups(numbers).reshape(len(codes), GROUP, blocks, packing.parts).transpose(0, 2, 3, 1)
            stored = np.ascontiguousarray(grouped, dtype="<f2" if packing.half else "<f4")
            at, size = place * packing.scale_bytes * packing.parts, packing.scale_bytes * packing.parts
            out[:, :, at : at + size] = stored.view(np.uint8).reshape(len(codes), blocks, size)
    vectors = codes.reshape(len(codes), GROUP, blocks, BLOCK // 4, 4).transpose(0, 2, 3, 1, 4)
    vectors = vectors.reshape(len(codes), blocks, BLOCK // 4, 32)
    if packing.nibbles:
        vectors = vectors[:, :, :4] | (vectors[:, :, 4:] << np.uint8(4))
    out[:, :, packing.codes_at :] = vectors.reshape(len(codes), blocks, -1)
    return out.reshape(len(codes), -1)
