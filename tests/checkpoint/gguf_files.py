"""A small GGUF writer, independent of the reader, whose every byte a test can get wrong on purpose.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_SCALARS = {
    UINT8: "<B", INT8: "<b", UINT16: "<H", INT16: "<h", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?",
    UINT64: "<Q", INT64: "<q", FLOAT64: "<d",
}  # fmt: skip


@dataclass(frozen=True)
class TypedValue:
    """A metadata value and its type: a number, a string, or a list of `item` values."""

    kind: int
    value: Any
    item: int | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; `shape` is slowest dimension first, `kind` GGUF's type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes


def u16(value: int) -> TypedValue:
    return TypedValue(UINT16, value)


def u32(value: int) -> TypedValue:
    return TypedValue(UINT32, value)


def i32(value: int) -> TypedValue:
    return TypedValue(INT32, value)


def text(value: str) -> TypedValue:
    return TypedValue(STRING, value)


def array(item: int, values: Sequence[Any]) -> TypedValue:
    return TypedValue(ARRAY, values, item)


def pack_string(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def pack_value(value: TypedValue) -> bytes:
    if value.kind == STRING:
        return pack_string(value.value)
    if value.kind == ARRAY:
        assert value.item is not None
        items = (item if isinstance(item, TypedValue) else TypedValue(value.item, item) for item in value.value)
        return struct.pack("<IQ", value.item, len(value.value)) + b"".join(map(pack_value, items))
    return struct.pack(_SCALARS[value.kind], value.value)


def pack_key(name: str | bytes, value: TypedValue) -> bytes:
    return pack_string(name) + struct.pack("<I", value.kind) + pack_value(value)


def pack_entry(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return pack_string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def pack_file(
    keys: Sequence[bytes],
    entries: Sequence[bytes],
    data: bytes,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(entries) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(entries)
    return padded(header, alignment) + data


def padded(data: bytes, alignment: int = 32) -> bytes:
    return data + bytes(-len(data) % alignment)


def gguf_bytes(
    metadata: Mapping[str, TypedValue], tensors: Iterable[Tensor], *, version: int = 3, alignment: int = 32
) -> bytes:
    """A well-formed file."""
    entries, data = [], b""
    for tensor in tensors:
        entries.append(pack_entry(tensor.name, tensor.shape, tensor.kind, len(data)))
        data += padded(tensor.data, alignment)
    keys = [pack_key(name, value) for name, value in metadata.items()]
    return pack_file(keys, entries, data, version=version, alignment=alignment)


def write(directory: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], format: str) -> Tensor:
    """A tensor of random bytes."""
    kind = gguf.GGMLQuantizationType[format]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    nbytes = math.prod(shape) // block_values * block_bytes
    return Tensor(name, shape, int(kind), rng.integers(0, 256, nbytes, np.uint8).tobytes())


LLAMA_METADATA: dict[str, TypedValue] = {
    "general.architecture": text("llama"),
    "general.name": text("Tiny"),
    "llama.block_count": u32(2),
    "llama.context_length": u32(256),
    "llama.embedding_length": u32(64),
    "llama.attention.head_count": u32(4),
    "llama.attention.layer_norm_rms_epsilon": TypedValue(FLOAT32, 1e-5),
    "llama.rope.freq_base": TypedValue(FLOAT32, 10000.0),
    "tokenizer.ggml.model": text("gpt2"),
    "tokenizer.ggml.add_bos_token": TypedValue(BOOL, False),
}


def tiny_llama(vocabulary: int = 2000, *, output: bool = False) -> bytes:
    """A llama of two layers in several formats, with a vocabulary: about 150 KB, more than a third of it header."""
    rng = np.random.default_rng(7)
    metadata = {
        **LLAMA_METADATA,
        "tokenizer.ggml.tokens": array(STRING, [f"token{i}é" for i in range(vocabulary)]),
        "tokenizer.ggml.token_type": array(INT32, [1] * vocabulary),
        "tokenizer.ggml.merges": array(STRING, [f"a{i} b{i}" for i in range(vocabulary // 2)]),
        "tokenizer.chat_template": text("{% for m in messages %}{{ m.content }}{% endfor %}"),
    }
    tensors = [random_tensor(rng, "token_embd.weight", (256, 64), "Q4_1")]
    for layer in range(2):
        tensors += [
            random_tensor(rng, f"blk.{layer}.attn_norm.weight", (64,), "F32"),
            random_tensor(rng, f"blk.{layer}.attn_q.weight", (64, 64), "Q8_0"),
            random_tensor(rng, f"blk.{layer}.attn_k.weight", (32, 64), "Q5_0"),
            random_tensor(rng, f"blk.{layer}.ffn_down.weight", (64, 256), "Q6_K"),
            random_tensor(rng, f"blk.{layer}.ffn_up.weight", (192, 64), "F16" if layer else "IQ4_NL"),
        ]
    tensors.append(random_tensor(rng, "output_norm.weight", (64,), "F32"))
    if output:
        tensors.append(random_tensor(rng, "output.weight", (256, 64), "BF16"))
    return gguf_bytes(metadata, tensors)
