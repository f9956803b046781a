"""Tensor formats: how numbers lie in a checkpoint, and how to read them back as float32.

A format is described once, in `FORMATS`. Backends that read the blocks themselves take the sizes from here; the
functions of this module expand whole tensors and serve as the reference for those backends' unpacking.

Source of the block layouts: the GGUF specification and ggml's reference quantisation. In the notes below `d` is a
block's float16 scale, `m` its float16 minimum, `q` the stored integer. All arithmetic is float32, one rounding per
operation and no fused multiply-add, in the order written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """One tensor format.

    Attributes:
        name: the name used everywhere in PocketLLM, such as ``Q4_1`` or ``BF16``.
        block_values: how many consecutive values of a row share one block (1 for plain numbers).
        block_bytes: bytes of one block.
        gguf_type: the type's number in a GGUF file, or None when GGUF has no such type.
    """

    name: str
    block_values: int
    block_bytes: int
    gguf_type: int | None

    @property
    def bits_per_value(self) -> float:
        """Bits of storage for one value, scales included."""
        return 8.0 * self.block_bytes / self.block_values

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; ValueError when the row does not fill whole blocks."""
        blocks, rest = divmod(columns, self.block_values)
        if rest:
            raise ValueError(f"a row of {columns} values is no multiple of {self.name}'s block of {self.block_values}")
        return blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A tensor as the checkpoint stores it.

    Attributes:
        data: uint8 [rows, row_bytes], usually a read-only view of the mapped file; `rows` is the product of all
            dimensions but the last, and a row's blocks lie one after another.
        format: a key of `FORMATS`.
        shape: the logical shape, slowest dimension first (as NumPy and PyTorch write it).
        layout: ``rows`` as stored; a runtime that repacks a tensor names its own layout here.
    """

    data: npt.NDArray[np.uint8]
    format: str
    shape: tuple[int, ...]
    layout: str = "rows"


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("F32", 1, 4, 0),
        Format("F16", 1, 2, 1),
        Format("BF16", 1, 2, 30),
        Format("I32", 1, 4, 26),
        Format("I64", 1, 8, 27),
        Format("Q4_0", 32, 18, 2),
        Format("Q4_1", 32, 20, 3),
        Format("Q5_0", 32, 22, 6),
        Format("Q5_1", 32, 24, 7),
        Format("Q8_0", 32, 34, 8),
        Format("Q2_K", 256, 84, 10),
        Format("Q3_K", 256, 110, 11),
        Format("Q4_K", 256, 144, 12),
        Format("Q5_K", 256, 176, 13),
        Format("Q6_K", 256, 210, 14),
        Format("IQ4_NL", 32, 18, 20),
        Format("IQ4_XS", 256, 136, 23),
    )
}
"""Every format that is read, by name. I32 and I64 hold indices (expert tables), never weights."""

UNSUPPORTED_GGUF_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""GGUF type numbers (ggml's `enum ggml_type`, withdrawn ones included) that are known by name but not read."""


def data_shape(format: Format, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and bytes of a row, the shape of `QuantTensor.data`, in exact integers.

    A tensor without dimensions is one row of one value. ValueError when rows do not fill whole blocks.
    """
    return math.prod(shape[:-1]), format.row_bytes(shape[-1] if shape else 1)


_SLICE_VALUES = 1 << 17
"""Values expanded at a time: their temporaries stay in the processor's cache and far below the output's size."""


def dequantize(tensor: QuantTensor) -> Floats:
    """Expand a tensor to float32.

    Returns:
        A new float32 array of ``tensor.shape``, bit for bit what ggml's reference arithmetic gives. Infinite or NaN
        scales go through as IEEE 754 has it. Besides the output, memory of a few megabytes is used (and a copy of the
        blocks when ``tensor.data`` is not contiguous).

    Raises:
        ValueError: an unknown layout or format, data that does not fit the shape, or an integer format.
    """
    unpack = _UNPACK.get(tensor.format)
    if unpack is None:
        raise ValueError(f"{tensor.format} cannot be expanded to float32; it is possible for: {', '.join(_UNPACK)}")
    format = _checked_format(tensor)
    blocks = tensor.data.reshape(-1, format.block_bytes)
    values = np.empty((len(blocks), format.block_values), np.float32)
    step = _SLICE_VALUES // format.block_values
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            values[start : start + step] = unpack(blocks[start : start + step])
    return values.reshape(tensor.shape)


def integers(tensor: QuantTensor) -> npt.NDArray[np.int64]:
    """Read an I32 or I64 tensor.

    Returns:
        A new int64 array of ``tensor.shape``.

    Raises:
        ValueError: another format or an unknown layout, or data that does not fit the shape.
    """
    if tensor.format not in ("I32", "I64"):
        raise ValueError(f"a tensor of format {tensor.format} holds no integers; use dequantize()")
    _checked_format(tensor)
    stored = "<i4" if tensor.format == "I32" else "<i8"
    return np.ascontiguousarray(tensor.data).view(stored).astype(np.int64).reshape(tensor.shape)


def _checked_format(tensor: QuantTensor) -> Format:
    if tensor.layout != "rows":
        raise ValueError(f"a tensor in layout {tensor.layout!r} can only be read by the runtime that repacked it")
    format = FORMATS[tensor.format]
    expected = data_shape(format, tensor.shape)
    if tensor.data.shape != expected or tensor.data.dtype != np.uint8:
        found = f"{tensor.data.dtype} {list(tensor.data.shape)}"
        raise ValueError(
            f"a {tensor.format} tensor of shape {tensor.shape} takes uint8 {list(expected)}, but its data is {found}"
        )
    return format


# Each function below expands blocks, uint8 [n, block_bytes], to float32 [n, block_values].


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _fields(packed: Bytes, bits: int, group: int) -> Bytes:
    """Split bytes into fields of `bits` bits, uint8 [n, bytes] to uint8 [n, bytes * 8 / bits].

    The bytes are taken in groups of `group`: first the lowest fields of the whole group, then the next higher ones.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    mask = np.uint8((1 << bits) - 1)
    grouped = packed.reshape(len(packed), -1, 1, group)
    return ((grouped >> shifts) & mask).reshape(len(packed), -1)


def _scaled(scales: Floats, quants: npt.NDArray[np.integer] | Floats) -> Floats:
    """scale * q, where a row's scales, [n, s], each cover an equal share of its quants, [n, s, v] as returned."""
    shared = quants.reshape(*scales.shape, -1).astype(np.float32, copy=False)
    return scales[:, :, None] * shared


def _unpack_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _unpack_f16(blocks: Bytes) -> Floats:
    return _half(blocks, 0)


def _unpack_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _unpack_q4_0(blocks: Bytes) -> Floats:
    """d (q - 8): d, then 16 bytes with values 0..15 in the low and 16..31 in the high nibbles."""
    quants = _fields(blocks[:, 2:], 4, 16).view(np.int8) - np.int8(8)
    return _half(blocks, 0) * quants.astype(np.float32)


def _unpack_q4_1(blocks: Bytes) -> Floats:
    """d q + m: d, m, nibbles as in Q4_0."""
    quants = _fields(blocks[:, 4:], 4, 16).astype(np.float32)
    quants *= _half(blocks, 0)
    quants += _half(blocks, 2)
    return quants


def _five_bits(high: Bytes, nibbles: Bytes) -> Bytes:
    """Join the fifth bits, one a value in 4 bytes, with the nibbles of Q5_0 and Q5_1."""
    return _fields(nibbles, 4, 16) | (np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4))


def _unpack_q5_0(blocks: Bytes) -> Floats:
    """d (q - 16): d, 4 bytes of fifth bits, nibbles as in Q4_0."""
    quants = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    return _half(blocks, 0) * quants.astype(np.float32)


def _unpack_q5_1(blocks: Bytes) -> Floats:
    """d q + m: d, m, 4 bytes of fifth bits, nibbles as in Q4_0."""
    quants = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _unpack_q8_0(blocks: Bytes) -> Floats:
    """d q: d, then 32 int8."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _unpack_q2_k(blocks: Bytes) -> Floats:
    """(d s) q - (m t): 16 bytes with scale s (low) and minimum t (high nibble) per 16 values; 2-bit q; d, m."""
    scales = (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minima = (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    scaled = _scaled(_half(blocks, 80) * scales, _fields(blocks[:, 16:80], 2, 32))
    return (scaled - (_half(blocks, 82) * minima)[:, :, None]).reshape(-1, 256)


def _unpack_q3_k(blocks: Bytes) -> Floats:
    """(d (s - 32)) (q - 4): 32 bytes of third bits; 64 of low bits; 12 with a 6-bit s per 16 values; d."""
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    quants = _fields(blocks[:, 32:96], 2, 32) | (_fields(blocks[:, :32], 1, 32) << np.uint8(2))
    scaled = _scaled(_half(blocks, 108) * scales.astype(np.float32), quants.view(np.int8) - np.int8(4))
    return scaled.reshape(-1, 256)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """The scales d s and minima m t of Q4_K and Q5_K, float32 [n, 8] each, one per 32 values.

    Layout: d, m, then 12 bytes. Bytes 0..3 hold s of groups 0..3 in six bits, bytes 4..7 their t. Bytes 8..11 hold
    the low four bits of s and t of groups 4..7, whose high two bits are the top bits of bytes 0..3 and 4..7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, two, four = np.uint8(0x3F), np.uint8(0x30), np.uint8(4)
    scales = np.concatenate([first & six, (third & np.uint8(15)) | ((first >> np.uint8(2)) & two)], axis=1)
    minima = np.concatenate([second & six, (third >> four) | ((second >> np.uint8(2)) & two)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minima.astype(np.float32)


def _unpack_q4_k(blocks: Bytes) -> Floats:
    """(d s) q - (m t): scales and minima, then 128 bytes of nibbles in groups of 32."""
    scales, minima = _scales_and_minima(blocks)
    return (_scaled(scales, _fields(blocks[:, 16:], 4, 32)) - minima[:, :, None]).reshape(-1, 256)


def _unpack_q5_k(blocks: Bytes) -> Floats:
    """(d s) q - (m t): scales and minima, 32 bytes of fifth bits, 128 bytes of nibbles in groups of 32."""
    scales, minima = _scales_and_minima(blocks)
    quants = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << np.uint8(4))
    return (_scaled(scales, quants) - minima[:, :, None]).reshape(-1, 256)


def _unpack_q6_k(blocks: Bytes) -> Floats:
    """(d s) (q - 32): 128 bytes of low nibbles, 64 of high bit pairs, an int8 s per 16 values, d."""
    quants = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << np.uint8(4))
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(scales, quants.view(np.int8) - np.int8(32)).reshape(-1, 256)


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The sixteen levels of ggml's non-linear 4-bit formats (`kvalues_iq4nl`)."""


def _unpack_iq4_nl(blocks: Bytes) -> Floats:
    """d level[q]: d, nibbles as in Q4_0."""
    return _half(blocks, 0) * _IQ4_VALUES[_fields(blocks[:, 2:], 4, 16)]


def _unpack_iq4_xs(blocks: Bytes) -> Floats:
    """(d (s - 32)) level[q]: d; per 32 values a 6-bit s (2 bytes of high bits, 4 of low); nibbles in groups of 16."""
    low, high = _fields(blocks[:, 4:8], 4, 1), _fields(blocks[:, 2:4], 2, 1)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    levels = _IQ4_VALUES[_fields(blocks[:, 8:], 4, 16)]
    return _scaled(_half(blocks, 0) * scales.astype(np.float32), levels).reshape(-1, 256)


_UNPACK: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _unpack_f32,
    "F16": _unpack_f16,
    "BF16": _unpack_bf16,
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q2_K": _unpack_q2_k,
    "Q3_K": _unpack_q3_k,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
    "IQ4_NL": _unpack_iq4_nl,
    "IQ4_XS": _unpack_iq4_xs,
}
