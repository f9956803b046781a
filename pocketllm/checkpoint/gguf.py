"""GGUF checkpoints, in one file or split over several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pocketllm.checkpoint.gguf_header import GgufHeader, read_header
from pocketllm.checkpoint.mapped import MappedCheckpoint, MappedFile, StoredTensor
from pocketllm.errors import CheckpointError

_SHARD_NAME = re.compile(r"(?P<set>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GgufCheckpoint(MappedCheckpoint):
    """A GGUF checkpoint; `config` is the metadata of its (first) file.

    Shards as llama.cpp's splitter writes them are opened together: they lie side by side under names such as
    ``name-00002-of-00003.gguf``, and the keys ``split.no`` (from 0), ``split.count`` and ``split.tensors.count`` of
    each must agree with the names, with one another and with the tensors found.

    Args:
        path: the file, or any one shard.

    Raises:
        CheckpointError: not a GGUF file, damaged, cut short, of a version, byte order or tensor type that is not
            read, or with a shard that is missing or disagrees.
    """

    def __init__(self, path: str | Path) -> None:
        shards = _open_shards(Path(path))
        files = [file for file, _ in shards]
        super().__init__(files[0].path, files, _merged(shards))
        self.naming = "gguf"
        self.config = shards[0][1].metadata
        self.generation_config = {}
        model_type = self.config.get("general.architecture")
        if not isinstance(model_type, str) or not model_type:
            raise CheckpointError(
                f"{self.path}: metadata key 'general.architecture' is missing or no text: the model family is unknown"
            )
        self.model_type = model_type


def first_shard(path: Path) -> Path:
    """The first file of the set that a GGUF file's name says it belongs to; the path itself for a file on its own."""
    match = _SHARD_NAME.fullmatch(path.name)
    return path if match is None else path.with_name(_shard_name(match, 0))


def _shard_name(match: re.Match[str], index: int) -> str:
    return f"{match['set']}-{index + 1:05d}-of-{match['count']}.gguf"


def _open_shards(path: Path) -> list[tuple[MappedFile, GgufHeader]]:
    """Open the file, and its siblings when it says that it is one shard of several, in their order."""
    file = MappedFile(path)
    header = read_header(file)
    count = _split_number(file, header, "split.count", 1)
    if count <= 1:
        return [(file, header)]
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path}: metadata key 'split.count' says that this is one of {count} shards, but it is not named "
            f"NAME-00001-of-{count:05d}.gguf or alike: give the shards back their names"
        )
    paths = [path.with_name(_shard_name(match, index)) for index in range(count)]
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the checkpoint's {count} shards are missing beside it, the first of them "
            f"{missing[0]}: download the missing ones"
        )
    shards = []
    for index, shard in enumerate(paths):
        file = MappedFile(shard)
        header = read_header(file)
        _check_split_key(file, header, "split.no", index)
        _check_split_key(file, header, "split.count", count)
        shards.append((file, header))
    return shards


def _merged(shards: list[tuple[MappedFile, GgufHeader]]) -> list[StoredTensor]:
    """The tensors of all shards, after checking that no name is repeated and none is lacking."""
    home: dict[str, MappedFile] = {}
    for file, header in shards:
        for tensor in header.tensors:
            name = tensor.info.name
            if name in home:
                raise CheckpointError(f"{file.path}: tensor {name!r} is in {home[name].path.name} too")
            home[name] = file
    for file, header in shards:
        if len(shards) > 1:
            _check_split_key(file, header, "split.tensors.count", len(home))
    return [tensor for _, header in shards for tensor in header.tensors]


def _check_split_key(file: MappedFile, header: GgufHeader, key: str, expected: int) -> None:
    found = _split_number(file, header, key, -1)
    if found != expected:
        said = "is missing" if found == -1 else f"says {found}"
        raise CheckpointError(
            f"{file.path}: metadata key {key!r} {said}, but {expected} is right for this set of shards: they are of "
            "different checkpoints, or renamed"
        )


def _split_number(file: MappedFile, header: GgufHeader, key: str, default: int) -> int:
    value: Any = header.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{file.path}: metadata key {key!r} is {value!r}, no integer: the file is damaged")
    return value
