"""Opening a checkpoint by what lies at a path."""

from __future__ import annotations

import os
from pathlib import Path

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.gguf import GgufCheckpoint, first_shard
from pocketllm.checkpoint.mapped import list_directory
from pocketllm.checkpoint.safetensors import CONFIG_NAME, PICKLE_SUFFIXES, SafetensorsCheckpoint
from pocketllm.errors import CheckpointError, ModelNotFoundError


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint, deciding its format by what lies at `path`.

    Args:
        path: a GGUF file, any one shard of a split GGUF, a directory with ``config.json`` and safetensors files, or a
            directory that holds exactly one GGUF (or set of shards). In a directory that holds both, the safetensors
            files are the checkpoint.

    Raises:
        ModelNotFoundError: nothing lies at `path`.
        CheckpointError: what lies there is no checkpoint, more than one, or a damaged one.
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise ModelNotFoundError(f"{path}: there is no such file or directory")
    if os.path.isdir(path):
        return _open_directory(path)
    if path.name.endswith((".safetensors", ".json")):
        raise CheckpointError(
            f"{path}: this is one file of a checkpoint; give the directory that holds it and config.json: {path.parent}"
        )
    return GgufCheckpoint(path)


def _open_directory(directory: Path) -> Checkpoint:
    names = list_directory(directory)
    if CONFIG_NAME in names and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return SafetensorsCheckpoint(directory)
    ggufs = sorted({first_shard(directory / name) for name in names if name.endswith(".gguf")})
    if len(ggufs) == 1:
        return GgufCheckpoint(ggufs[0])
    if ggufs:
        raise CheckpointError(
            f"{directory}: holds {len(ggufs)} GGUF models; name one of them: {', '.join(path.name for path in ggufs)}"
        )
    if any(name.endswith((".safetensors", *PICKLE_SUFFIXES)) or name == CONFIG_NAME for name in names):
        return SafetensorsCheckpoint(directory)  # which says what is lacking
    raise CheckpointError(f"{directory}: holds no model: neither a .gguf file nor config.json with safetensors files")
