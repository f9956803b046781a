"""The header of one GGUF file: metadata and the places of its tensors.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. A file is

    "GGUF", u32 version, u64 tensor count, u64 key count,
    keys:     string name, u32 value type, value
    tensors:  string name, u32 number of dimensions, u64 each dimension (fastest first), u32 type, u64 offset
    data:     from the next multiple of `general.alignment` (32 when absent) on, from where the offsets count

with strings as u64 length and UTF-8 bytes, arrays as u32 value type, u64 count and values. As
in ggml, each tensor begins where the one before it ends, padded to the alignment. Every count and length is
compared, as an exact Python integer, with the bytes that are left before anything is read or allocated by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pocketllm.checkpoint.checkpoint import TensorInfo
from pocketllm.checkpoint.mapped import MappedFile, StoredTensor, check_contiguous
from pocketllm.checkpoint.quant import FORMATS, UNSUPPORTED_GGUF_TYPES, Format, data_shape
from pocketllm.checkpoint.sniff import SNIFF_BYTES, describe_content
from pocketllm.errors import CheckpointError

# No model comes near these. They bound the memory that a file crafted within the limits of its own size can cost:
# a parsed header takes up to ten times its bytes, and reading a text up to five times.
MAX_HEADER_BYTES = 64 << 20
MAX_STRING_BYTES = 32 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_VALUES = 1 << 21
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_BYTES = {
    **{kind: np.dtype(dtype).itemsize for kind, dtype in _NUMBERS.items()},
    _BOOL: 1,
    _STRING: 8,
    _ARRAY: 12,
}
"""The value types, by their number in the file, with the fewest bytes that a value takes."""

_FORMAT_OF_TYPE = {format.gguf_type: format for format in FORMATS.values() if format.gguf_type is not None}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the header of one GGUF file says.

    Attributes:
        metadata: the keys in the file's order; numbers, strings, bools, and lists of them.
        tensors: the tensors of this file; their data lies inside the file, without overlap or hole.
    """

    metadata: dict[str, Any]
    tensors: tuple[StoredTensor, ...]


def read_header(file: MappedFile) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        CheckpointError: this is no GGUF file, or of a version or byte order that is not read, or it is damaged or cut
            short; the message names the file and the key or tensor.
    """
    cursor = _Cursor(file)
    _check_magic_and_version(cursor)
    tensor_count = cursor.number("<u8", "the tensor count")
    key_count = cursor.number("<u8", "the metadata key count")
    # The least key is an empty name, a type and one byte; the least tensor an empty name and no dimensions.
    cursor.check_count(key_count, 13, MAX_KEYS, "metadata keys")
    metadata = _read_metadata(cursor, key_count)
    cursor.check_count(tensor_count, 24, MAX_TENSORS, "tensors")
    entries = [_read_tensor_entry(cursor, index) for index in range(tensor_count)]
    alignment = _alignment(file, metadata)
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(file, entry, data_start, alignment) for entry in entries)
    _check_names(file, tensors)
    check_contiguous(file, tensors, data_start, alignment)
    return GgufHeader(metadata, tensors)


class _Cursor:
    """Reads values one after another, and never past the end of the file or of what a header may take."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0
        self.end = min(file.size, MAX_HEADER_BYTES)

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path}: {message}")

    def overrun(self, what: str, stop: int) -> NoReturn:
        if self.end < self.file.size:
            self.fail(
                f"{what} reaches beyond the first {MAX_HEADER_BYTES} bytes, where every header ends: it is damaged"
            )
        self.fail(
            f"the file ends at byte {self.end}, but {what} needs bytes up to {stop}: its download is incomplete, "
            "or its header is damaged"
        )

    def check_count(self, count: int, least_bytes: int, limit: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, or that no model has."""
        if count * least_bytes > self.end - self.at:
            self.overrun(f"its count of {count} {what}", self.at + count * least_bytes)
        if count > limit:
            self.fail(f"it declares {count} {what}; more than {limit} are not read")

    def take(self, nbytes: int, what: str) -> bytes:
        start, stop = self.at, self.at + nbytes
        if stop > self.end:
            self.overrun(what, stop)
        self.at = stop
        return self.file.read(start, stop)

    def numbers(self, dtype: str, count: int, what: str) -> list[Any]:
        values: list[Any] = np.frombuffer(self.take(np.dtype(dtype).itemsize * count, what), dtype).tolist()
        return values

    def number(self, dtype: str, what: str) -> int:
        value: int = self.numbers(dtype, 1, what)[0]
        return value

    def name(self, what: str) -> str:
        length = self.number("<u8", what)
        if length > MAX_NAME_BYTES:
            self.fail(f"{what} is {length} bytes long: the file is damaged")
        self.at -= 8
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Read strings in one tight loop: a vocabulary and its merges are some hundred thousand of them."""
        read, from_bytes, end = self.file.read, int.from_bytes, self.end
        at = self.at
        values = []
        for index in range(count):
            start = at + 8
            at = start + from_bytes(read(at, start), "little")
            if at > end:
                self.overrun(what if count == 1 else f"{what}, string {index}", at)
            if at - start > MAX_STRING_BYTES:
                self.fail(f"{what} is a text of {at - start} bytes; more than {MAX_STRING_BYTES} are not read")
            try:
                values.append(read(start, at).decode())
            except UnicodeDecodeError as error:
                self.fail(f"{what} is no UTF-8 text (string {index}, {error.reason}): the file is damaged")
        self.at = at
        return values


def _check_magic_and_version(cursor: _Cursor) -> None:
    head = cursor.file.read(0, SNIFF_BYTES)
    if head[:4] != b"GGUF":
        cursor.fail(f"this is no GGUF file: {describe_content(head)}")
    cursor.at = 4
    stored = cursor.take(4, "the format version")
    version, swapped = int.from_bytes(stored, "little"), int.from_bytes(stored, "big")
    if version in _VERSIONS:
        return
    if swapped in _VERSIONS:
        cursor.fail("this is a big-endian GGUF file; only little-endian ones are read: convert it, or get another copy")
    cursor.fail(f"GGUF version {version} is not read, only 2 and 3: convert the model anew, or get a current copy")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.name(f"the name of metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {key!r} is there twice: the file is damaged")
        what = f"metadata key {key!r}"
        kind = cursor.number("<u4", what)
        metadata[key] = _read_values(cursor, kind, 1, what, MAX_ARRAY_DEPTH)[0]
    return metadata


def _read_values(cursor: _Cursor, kind: int, count: int, what: str, depth: int) -> list[Any]:
    """Read `count` values of one type; `depth` is how many arrays may still lie in one another."""
    if kind not in _LEAST_BYTES:
        cursor.fail(f"{what} is of unknown value type {kind}: the file is damaged, or newer than what is read here")
    cursor.check_count(count, _LEAST_BYTES[kind], MAX_ARRAY_VALUES, f"values of {what}")
    if kind == _STRING:
        return cursor.strings(count, what)
    if kind == _ARRAY:
        if depth == 0:
            cursor.fail(f"{what} is an array nested more than {MAX_ARRAY_DEPTH} deep")
        return [_read_array(cursor, what, depth - 1) for _ in range(count)]
    if kind == _BOOL:
        stored = cursor.take(count, what)
        if stored.strip(b"\0\1"):
            cursor.fail(f"{what} is a bool, but its byte is neither 0 nor 1: the file is damaged")
        return [byte == 1 for byte in stored]
    return cursor.numbers(_NUMBERS[kind], count, what)


def _read_array(cursor: _Cursor, what: str, depth: int) -> list[Any]:
    kind = cursor.number("<u4", what)
    count = cursor.number("<u8", what)
    return _read_values(cursor, kind, count, what, depth)


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int


def _read_tensor_entry(cursor: _Cursor, index: int) -> _TensorEntry:
    name = cursor.name(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    dimensions = cursor.number("<u4", what)
    if dimensions > MAX_DIMENSIONS:
        cursor.fail(f"{what} has {dimensions} dimensions; GGUF allows {MAX_DIMENSIONS}: the file is damaged")
    shape = tuple(reversed(cursor.numbers("<u8", dimensions, what)))
    if 0 in shape:
        cursor.fail(f"{what} has the empty shape {shape}: the file is damaged")
    kind = cursor.number("<u4", what)
    format = _FORMAT_OF_TYPE.get(kind)
    if format is None:
        known = UNSUPPORTED_GGUF_TYPES.get(kind, "a number that no known type has")
        supported = ", ".join(_FORMAT_OF_TYPE[kind].name for kind in sorted(_FORMAT_OF_TYPE))
        cursor.fail(f"{what} is of type {kind} ({known}), which is not supported. Supported: {supported}")
    return _TensorEntry(name, shape, format, cursor.number("<u8", what))


def _alignment(file: MappedFile, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{file.path}: metadata key 'general.alignment' is {alignment!r}, no power of two")
    return alignment


def _place(file: MappedFile, entry: _TensorEntry, data_start: int, alignment: int) -> StoredTensor:
    """Check a tensor's size and place against the file, in exact integers."""
    what = f"{file.path}: tensor {entry.name!r}"
    try:
        rows, row_bytes = data_shape(entry.format, entry.shape)
    except ValueError as error:
        raise CheckpointError(f"{what} of shape {entry.shape}: {error}; the file is damaged") from None
    nbytes = rows * row_bytes
    if entry.offset % alignment:
        raise CheckpointError(
            f"{what} lies at offset {entry.offset}, no multiple of the alignment {alignment}: the file is damaged"
        )
    start = data_start + entry.offset
    if start + nbytes > file.size:
        raise CheckpointError(
            f"{what} ({entry.format.name}, shape {entry.shape}) needs bytes {start} to {start + nbytes}, but the file "
            f"ends at byte {file.size}: its download is incomplete, or its header is damaged"
        )
    return StoredTensor(TensorInfo(entry.name, entry.shape, entry.format.name, nbytes), file, start)


def _check_names(file: MappedFile, tensors: tuple[StoredTensor, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.info.name in seen:
            raise CheckpointError(f"{file.path}: tensor {tensor.info.name!r} is there twice: the file is damaged")
        seen.add(tensor.info.name)
