"""Safetensors checkpoints: a directory with ``config.json`` and one or more ``.safetensors`` files.

Source: the safetensors format description (u64 header length, JSON header, data) and the layout of directories on the
Hugging Face Hub (`model.safetensors`, or shards named by `model.safetensors.index.json`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pocketllm.checkpoint.checkpoint import TensorInfo
from pocketllm.checkpoint.json_objects import (
    MAX_JSON_BYTES,
    brief,
    parse_json_object,
    read_json_object,
)
from pocketllm.checkpoint.mapped import MappedCheckpoint, MappedFile, StoredTensor, check_contiguous, list_directory
from pocketllm.checkpoint.quant import FORMATS
from pocketllm.checkpoint.sniff import NO_PICKLE, SNIFF_BYTES, describe_content
from pocketllm.errors import CheckpointError

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

MAX_DIMENSIONS = 32
MAX_NAME_LENGTH = 1024

DTYPES = tuple(format.name for format in FORMATS.values() if format.block_values == 1)
"""The dtypes that are read; safetensors and `FORMATS` give plain numbers the same names."""


class SafetensorsCheckpoint(MappedCheckpoint):
    """A safetensors checkpoint.

    With an index, exactly the shards that it names are read, and it must agree with them tensor by tensor: other
    files beside them are left alone, `model.safetensors` too. Its ``metadata.total_size`` is refused only where it is
    larger than the tensors of all shards together; tools that count tied weights or parameters otherwise write less.

    Args:
        path: the directory.

    Raises:
        CheckpointError: a file is missing, damaged, cut short, or disagrees with another; or a dtype is not read.
    """

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        names = list_directory(directory)
        shards = _open_shards(directory, names)
        super().__init__(directory, shards, [tensor for tensors in shards.values() for tensor in tensors])
        if CONFIG_NAME not in names:
            raise CheckpointError(f"{directory}: {CONFIG_NAME}, which says what the weights are, is missing: add it")
        self.config = read_json_object(MappedFile(directory / CONFIG_NAME))
        self.generation_config = {}
        if GENERATION_CONFIG_NAME in names:
            self.generation_config = read_json_object(MappedFile(directory / GENERATION_CONFIG_NAME))
        self.naming = "hf"
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise CheckpointError(
                f"{directory / CONFIG_NAME}: key 'model_type' is missing or no text, so the model family is unknown"
            )
        self.model_type = model_type


def _open_shards(directory: Path, names: list[str]) -> dict[MappedFile, list[StoredTensor]]:
    """The checkpoint's files and the tensors in each."""
    if INDEX_NAME in names:
        return _open_indexed(directory, names)
    if WEIGHTS_NAME in names:
        file = MappedFile(directory / WEIGHTS_NAME)
        return {file: _read_header(file)}
    if pickled := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        raise CheckpointError(f"{directory}: its weights are pickle files ({pickled[0]}). {NO_PICKLE}")
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"; the .safetensors files here go by other names: {', '.join(others[:5])}" if others else ""
    raise CheckpointError(f"{directory}: holds neither {WEIGHTS_NAME} nor {INDEX_NAME}{found}")


def _open_indexed(directory: Path, names: list[str]) -> dict[MappedFile, list[StoredTensor]]:
    index_file = MappedFile(directory / INDEX_NAME)
    index = read_json_object(index_file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file.path}: key 'weight_map' is missing or maps no tensor to a shard")
    listed: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_file.path}: tensor {tensor!r} lies in {shard!r}, which is no name of a .safetensors file here"
            )
        listed.setdefault(shard, set()).add(tensor)
    if absent := sorted(listed.keys() - set(names)):
        raise CheckpointError(
            f"{index_file.path}: {len(absent)} of {len(listed)} shards are missing, the first of them {absent[0]}: "
            "download the missing ones, or remove the index if it is of another checkpoint"
        )
    shards = {}
    for shard in sorted(listed):
        file = MappedFile(directory / shard)
        shards[file] = _read_header(file)
        _check_listed(index_file, weight_map, shard, listed[shard], {tensor.info.name for tensor in shards[file]})
    _check_total_size(index_file, index, sum(t.info.nbytes for tensors in shards.values() for t in tensors))
    return shards


def _check_listed(
    index_file: MappedFile, weight_map: dict[str, Any], shard: str, listed: set[str], held: set[str]
) -> None:
    """Refuse a shard that does not hold exactly the tensors that the index says are in it."""
    if lacking := sorted(listed - held):
        raise CheckpointError(f"{index_file.path}: tensor {lacking[0]!r} is listed in {shard}, but is not in that file")
    if extra := sorted(held - listed):
        elsewhere = weight_map.get(extra[0])
        said = f"in {elsewhere}" if elsewhere else "nowhere"
        raise CheckpointError(f"{index_file.path}: tensor {extra[0]!r} is in {shard}, but the index lists it {said}")


def _check_total_size(index_file: MappedFile, index: dict[str, Any], held: int) -> None:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, int | float) and total > held:
        raise CheckpointError(
            f"{index_file.path}: key 'metadata.total_size' promises {total} bytes of tensors, but the shards hold "
            f"{held}: the index is of another checkpoint"
        )


def _read_header(file: MappedFile) -> list[StoredTensor]:
    """Read and check the header of one safetensors file."""
    head = file.read(0, SNIFF_BYTES)
    if head[8:9] != b"{":
        raise CheckpointError(f"{file.path}: this is no safetensors file: {describe_content(head)}")
    length = int.from_bytes(head[:8], "little")
    start = 8 + length
    if length > MAX_JSON_BYTES:
        raise CheckpointError(f"{file.path}: its header of {length} bytes is larger than any that is read")
    if start > file.size:
        raise CheckpointError(
            f"{file.path}: the file ends at byte {file.size}, but its header needs bytes up to {start}: "
            "its download is incomplete, or its header is damaged"
        )
    header = parse_json_object(file, file.read(8, start), "its header")
    tensors = [_place(file, name, entry, start) for name, entry in header.items() if name != "__metadata__"]
    end = check_contiguous(file, tensors, start, alignment=1)
    if end != file.size:
        raise CheckpointError(f"{file.path}: its tensors end at byte {end}, but the file only at {file.size}: damaged")
    return tensors


def _place(file: MappedFile, name: str, entry: Any, start: int) -> StoredTensor:
    """Check one tensor's entry in a header, in exact integers."""
    what = f"{file.path}: tensor {brief(name)!r}"
    if len(name) > MAX_NAME_LENGTH:
        raise CheckpointError(f"{what} has a name of {len(name)} letters: the file is damaged")
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{what} has no dtype, shape and pair of data_offsets in the header: the file is damaged"
        ) from None
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{what} is of dtype {brief(dtype)!r}, which is not supported. Supported: {', '.join(DTYPES)}"
        )
    sizes = (*shape, begin, end) if isinstance(shape, list) else (None,)
    if not all(type(size) is int and size >= 0 for size in sizes) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{what} has the shape {brief(shape)} and data_offsets {brief([begin, end])}; both must be lists of "
            f"integers from 0 on, and the shape of at most {MAX_DIMENSIONS}: the file is damaged"
        )
    nbytes = math.prod(shape) * FORMATS[dtype].block_bytes
    if end - begin != nbytes or any(size >= 1 << 48 for size in shape):
        raise CheckpointError(
            f"{what} ({dtype}, shape {brief(shape)}) does not fill its data_offsets {brief([begin, end])}: "
            "the file is damaged"
        )
    if start + end > file.size:
        raise CheckpointError(
            f"{what} needs bytes {start + begin} to {start + end}, but the file ends at byte {file.size}: "
            "its download is incomplete, or its header is damaged"
        )
    return StoredTensor(TensorInfo(name, tuple(shape), dtype, nbytes), file, start + begin)
