"""Damaged GGUF files: each ends in a CheckpointError or loads what the gguf package finds in it, in little memory."""

from __future__ import annotations

import faulthandler
import struct
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from pocketllm.checkpoint.gguf import GgufCheckpoint
from pocketllm.checkpoint.quant import dequantize
from pocketllm.errors import CheckpointError

from .gguf_files import tiny_llama

HEAD_BYTES = 64 << 10
MEMORY_LIMIT = 200 << 20
HANG_SECONDS = 60
CASES_PER_SEED = 50
SEEDS = range(6)  # more of them make a longer hunt

_NUMBERS = [0, 1, 2, 8, 9, 13, 31, 32, 255, 2**15, 2**16, 2**21, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
_NUMBERS += [2**48, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """Damage the first 64 KB of a file, mostly in one place."""
    damaged = bytearray(content)
    entries = content.find(b"token_embd.weight") - 8
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        # Damage reaches furthest among the counts and keys at the very start, and in the tensors' entries.
        first, last = [(0, 700), (max(entries, 0), entries + 900), (0, HEAD_BYTES)][rng.integers(0, 3)]
        at = int(rng.integers(first, max(min(last, len(damaged) - 8), first + 1)))
        _damage_at(damaged, at, rng)
    return bytes(damaged)


def _damage_at(damaged: bytearray, at: int, rng: np.random.Generator) -> None:
    match rng.choice(["byte", "bit", "bit", "nudge", "nudge", "u32", "u64", "delete", "insert", "copy", "cut"]):
        case "byte":
            damaged[at : at + 1] = rng.bytes(1)
        case "bit":
            damaged[at : at + 1] = bytes(byte ^ 1 << int(rng.integers(0, 8)) for byte in damaged[at : at + 1])
        case "nudge":
            damaged[at : at + 1] = bytes((byte + int(rng.integers(-3, 4))) % 256 for byte in damaged[at : at + 1])
        case "u32":
            damaged[at : at + 4] = struct.pack("<I", _NUMBERS[rng.integers(0, 15)])
        case "u64":
            damaged[at : at + 8] = struct.pack("<Q", _NUMBERS[rng.integers(0, len(_NUMBERS))])
        case "delete":
            del damaged[at : at + int(rng.integers(1, 33))]
        case "insert":
            damaged[at:at] = rng.bytes(int(rng.integers(1, 33)))
        case "copy":
            source = int(rng.integers(0, HEAD_BYTES))
            damaged[at : at + 64] = damaged[source : source + 64]
        case "cut":
            del damaged[max(at, 16) :]


def same_as_gguf_package(checkpoint: GgufCheckpoint, path: Path) -> bool:
    """Compare with the gguf package, which checks less and so must be able to read the file too."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError):
        return False
    assert list(checkpoint.tensors) == [tensor.name for tensor in reader.tensors]
    for expected in reader.tensors:
        tensor = checkpoint.tensor(expected.name)
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.data.tobytes() == expected.data.tobytes()
    for key, value in checkpoint.config.items():
        field = reader.fields[key]
        if field.types[:2] != [gguf.GGUFValueType.ARRAY] * 2:  # which that reader flattens
            np.testing.assert_equal(value, field.contents() if value != [] else [])
    return True


def outcome(path: Path) -> str:
    """Open one damaged file and read all of it: `refused` or `loaded`; anything else raises."""
    tracemalloc.start()
    try:
        checkpoint = GgufCheckpoint(path)
        for name, info in checkpoint.tensors.items():
            tensor = checkpoint.tensor(name)
            assert tensor.data.nbytes == info.nbytes
            if info.format not in ("I32", "I64"):
                assert dequantize(tensor).shape == info.shape
    except CheckpointError:
        return "refused"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_LIMIT
    assert same_as_gguf_package(checkpoint, path)
    return "loaded"


@pytest.fixture(autouse=True)
def hang_guard() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    content = tiny_llama(vocabulary=1200)
    path = tmp_path / "model.gguf"
    outcomes: Counter[str] = Counter()
    for _ in range(CASES_PER_SEED):
        path.write_bytes(damage(content, rng))
        outcomes[outcome(path)] += 1
    assert min(outcomes["refused"], outcomes["loaded"]) >= 3, "the damage is all of one kind"
