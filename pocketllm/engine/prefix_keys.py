"""Keys of a prompt's blocks: what a block's cache entries depend on, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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

    Without a length-dependent scaling that is nothing; with one, lengths within the trained one are alike.
    """
    trained = [rotary.original_length for rotary in config.rotaries if rotary.dynamic_factor]
    if not trained:
        return lambda rope_length: 0
    return lambda rope_length: max(rope_length, min(trained))


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """Tells checkpoints apart by all that their tensors hold, wherever the files lie."""
    hashed = hashlib.blake2b(checkpoint.model_type.encode(), digest_size=KEY_BYTES)
    names = sorted(checkpoint.tensors)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run, and a model has gigabytes
        numbers = pool.map(lambda name: _hash(np.ascontiguousarray(checkpoint.tensor(name).data).data), names)
        for name, digest in zip(names, numbers, strict=True):
            info = checkpoint.tensors[name]
            hashed.update(json.dumps([name, info.shape, info.format, info.nbytes]).encode() + digest)
    return hashed.hexdigest()


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
