"""Keys of blocks: equal for equal tokens after equal tokens on an equal model, and for nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.engine.prefix_keys import KEY_BYTES, PrefixKeys, checkpoint_identity, rope_class
from pocketllm.models.family import family, model_types
from pocketllm.models.rotary import Rotary
from tests.scripted import ScriptedConfig

tokens = st.lists(st.integers(0, 2), max_size=12)


@given(tokens, tokens, st.integers(1, 4))
def test_keys_are_equal_as_far_as_tokens_are(first: list[int], second: list[int], size: int) -> None:
    keys = PrefixKeys("model")
    chains = [keys.chain(keys.root(0), row, size) for row in (first, second)]
    assert [len(chain) for chain in chains] == [len(first) // size, len(second) // size]
    for end, (one, other) in enumerate(zip(*chains, strict=False), start=1):
        assert (one == other) == (first[: size * end] == second[: size * end])
        assert len(one) == KEY_BYTES


@given(tokens, st.integers(0, 3))
def test_a_chain_can_be_continued(row: list[int], cut: int) -> None:
    keys = PrefixKeys("model")
    whole = keys.chain(keys.root(0), row, 3)
    head = whole[:cut]
    assert head + keys.chain(head[-1] if head else keys.root(0), row[3 * len(head) :], 3) == whole


def test_another_model_or_rotary_length_has_other_keys() -> None:
    roots = {PrefixKeys(identity).root(0) for identity in ("a", "b", "a\0", "")}
    assert len(roots) == 4
    keys = PrefixKeys("a", lambda length: max(length, 100))
    assert keys.root(5) == keys.root(100) != keys.root(101)
    assert PrefixKeys("a").root(5) == PrefixKeys("a").root(101)


def test_only_lengths_that_turn_differently_are_told_apart() -> None:
    plain = Rotary((1.0,))
    short, long = (Rotary((1.0,), dynamic_factor=2.0, original_length=length) for length in (64, 99))

    def classes(*rotaries: Rotary) -> Callable[[int], int]:
        return rope_class(ScriptedConfig(vocab_size=9, rotaries=rotaries))

    for same in (classes(), classes(plain)):
        assert same(10) == same(5000)
    for dynamic in (classes(short), classes(plain, long, short)):
        assert dynamic(10) == dynamic(64) != dynamic(65) != dynamic(66)


@pytest.mark.parametrize("model_type", [*model_types(), "qwen3_5_mtp"])
def test_every_familys_configuration_tells_its_rotary_embeddings(model_type: str) -> None:
    made = family(model_type)
    (rotary,) = made.parse_config("hf", made.tiny_config()).rotaries
    assert rotary.dim > 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def identity(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint_identity(checkpoint)


def test_a_checkpoint_is_another_when_its_numbers_or_shapes_are(folder: Path) -> None:
    first = identity(folder)
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 1))
    assert identity(folder) == first  # a copy is no other model
    stat = file.stat()
    found = {first}
    for changed in (np.full((2, 3), 0.5, np.float32), np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float16)):
        save_file({"a": changed}, file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        found.add(identity(folder))
    assert len(found) == 4


def test_one_number_amid_many_makes_another_checkpoint(folder: Path) -> None:
    numbers = np.zeros((64, 4096), np.float32)
    found = set()
    for row in range(64):
        numbers[row, 2048] = 1.0
        save_file({"a": numbers}, folder / "model.safetensors")
        found.add(identity(folder))
    assert len(found) == 64
