"""Keys of blocks: equal for equal tokens after equal tokens on an equal model, and for nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.engine.prefix_keys import KEY_BYTES, PrefixKeys, checkpoint_identity, rope_class
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


@dataclass(frozen=True)
class Turned(ScriptedConfig):
    rotary: Rotary = field(default_factory=lambda: Rotary((1.0,)))


def test_only_lengths_that_turn_differently_are_told_apart() -> None:
    plain = rope_class(Turned(vocab_size=9))
    assert plain(10) == plain(5000)
    dynamic = rope_class(Turned(vocab_size=9, rotary=Rotary((1.0,), dynamic_factor=2.0, original_length=64)))
    assert dynamic(10) == dynamic(64) != dynamic(65) != dynamic(66)
    unknown = rope_class(ScriptedConfig(vocab_size=9))
    assert unknown(10) != unknown(11)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def identity(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint_identity(checkpoint)


def test_a_checkpoint_is_another_when_its_files_change(folder: Path) -> None:
    first = identity(folder)
    assert identity(folder) == first
    os.utime(folder / "model.safetensors", ns=(0, 1))
    touched = identity(folder)
    assert touched != first
    save_file({"a": np.zeros((3, 2), np.float32)}, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(0, 1))
    assert identity(folder) != touched
