"""Keys of a prompt's blocks: what a block's cache entries depend on, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.models.family import ModelConfig

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Chains of hashes over everything that entries and states depend on.

    A key stands for its block's tokens and all before them. Keys are BLAKE2b with 256 bits, for which nobody can make
    two inputs meet; so equal keys are taken for equal tokens, which are not kept beside them.

    Attributes:
        identity: of what computes: `Runtime.numerics_id` and the checkpoint's identity.
        rope_class: from a sequence's rotary length to what the entries depend on of it; equal for lengths that give
            equal angles.
    """

    identity: str
    rope_class: Callable[[int], int] = lambda rope_length: 0

    def root(self, rope_length: int) -> bytes:
        """The key before a sequence's first block."""
        return _hash(f"{self.identity}\0{self.rope_class(rope_length)}".encode())

    def chain(self, parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """The keys of the full blocks of `token_ids`, which follow on the block (or root) with the key `parent`."""
        tokens = np.asarray(token_ids, dtype="<i4")
        keys = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = _hash(parent + tokens[start : start + block_size].tobytes())
            keys.append(parent)
        return keys


def rope_class(config: ModelConfig) -> Callable[[int], int]:
    """What of a rotary length a model's entries depend on.

    Without a length-dependent scaling that is nothing; with one, lengths within the trained one are alike. A
    configuration that does not tell gets every length apart, which costs hits and is always right.
    """
    rotary = getattr(config, "rotary", None)
    if rotary is None:
        return lambda rope_length: rope_length
    if not rotary.dynamic_factor:
        return lambda rope_length: 0
    return lambda rope_length: max(rope_length, rotary.original_length)


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Tells checkpoints apart without reading their weights: by headers, and by size and time of its files.

    A copy with another time counts as another checkpoint. Of a GGUF model in several files the first stands for all.
    """
    path = checkpoint.path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    tensors = sorted((info.name, info.shape, info.format, info.nbytes) for info in checkpoint.tensors.values())
    return _hash(json.dumps([checkpoint.model_type, stats, tensors]).encode()).hex()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
