"""Block-quantised tensors as integers: codes, and a scale and a minimum for each group of values.

A stored value is ``scale * (code - offset) + minimum``; `pocketllm.checkpoint.quant` states how blocks hold it. Each
format below is one function from blocks to `Codes`; all else is common to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.quant import FORMATS, QuantTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a tensor, K values each, in G groups of neighbours.

    Attributes:
        codes: uint8 [rows, K].
        scales: float32 [rows, G].
        minima: float32 [rows, G], or None for formats without.
        offset: subtracted from every code.
    """

    codes: Bytes
    scales: Floats
    minima: Floats | None
    offset: int


def row_codes(tensor: QuantTensor, start: int, stop: int) -> Codes:
    """Rows `start` up to `stop` of a tensor in one of `FORMATS_WITH_CODES`, in layout ``rows``."""
    format = FORMATS[tensor.format]
    rows = tensor.data[start:stop]
    found = _UNPACK[tensor.format](np.ascontiguousarray(rows).reshape(-1, format.block_bytes))

    def by_row(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return array.reshape(len(rows), -1)

    return Codes(
        codes=by_row(found.codes),  # type: ignore[arg-type]
        scales=by_row(found.scales),  # type: ignore[arg-type]
        minima=None if found.minima is None else by_row(found.minima),  # type: ignore[arg-type]
        offset=found.offset,
    )


def _half(blocks: Bytes, start: int) -> Floats:
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """In groups of bytes, first the lower and then the upper halves."""
    grouped = packed.reshape(len(packed), -1, 1, group)
    return ((grouped >> np.array([[0], [4]], np.uint8)) & np.uint8(15)).reshape(len(packed), -1)


def _bits(packed: Bytes, width: int, group: int) -> Bytes:
    """In groups of bytes, first the lowest fields of `width` bits, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    grouped = packed.reshape(len(packed), -1, 1, group)
    return ((grouped >> shifts) & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[:, 2:], 16), _half(blocks, 0), None, 8)


def _q4_1(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2), 0)


def _q5_0(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None, 16)


def _q5_1(blocks: Bytes) -> Codes:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return Codes(codes, _half(blocks, 0), _half(blocks, 2), 0)


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None, 128)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of Q4_K and Q5_K, [n, 8] each: six bits a number, packed into the 12 bytes from byte 4 on."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, two, four = np.uint8(0x3F), np.uint8(0x30), np.uint8(4)
    scales = np.concatenate([first & six, (third & np.uint8(15)) | ((first >> np.uint8(2)) & two)], axis=1)
    minima = np.concatenate([second & six, (third >> four) | ((second >> np.uint8(2)) & two)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[:, 16:], 32), *_scales_and_minima(blocks), 0)


def _q5_k(blocks: Bytes) -> Codes:
    codes = _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 1, 32) << np.uint8(4))
    return Codes(codes, *_scales_and_minima(blocks), 0)


def _q6_k(blocks: Bytes) -> Codes:
    codes = _nibbles(blocks[:, :128], 64) | (_bits(blocks[:, 128:192], 2, 32) << np.uint8(4))
    return Codes(codes, _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None, 32)


_UNPACK: dict[str, Callable[[Bytes], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

FORMATS_WITH_CODES = tuple(_UNPACK)
"""The formats that the op takes."""
