"""Which reader a path gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pocketllm.checkpoint.gguf import GgufCheckpoint
from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.checkpoint.safetensors import SafetensorsCheckpoint
from pocketllm.errors import CheckpointError, ModelNotFoundError

from . import gguf_files as files


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return files.write(tmp_path, files.tiny_llama(100))


def add_safetensors(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.zeros(4)}, directory / "model.safetensors")


def test_a_gguf_file(gguf_path: Path) -> None:
    with open_checkpoint(str(gguf_path)) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)


def test_a_gguf_by_another_name(gguf_path: Path) -> None:
    """Download caches name files by their hash."""
    renamed = gguf_path.rename(gguf_path.with_name("b179c952"))
    assert isinstance(open_checkpoint(renamed), GgufCheckpoint)


def test_a_directory_with_one_gguf(gguf_path: Path) -> None:
    (gguf_path.parent / "README.md").touch()
    (gguf_path.parent / "config.json").write_text("{}")
    checkpoint = open_checkpoint(gguf_path.parent)
    assert isinstance(checkpoint, GgufCheckpoint)
    assert checkpoint.path == gguf_path


def test_a_directory_with_one_set_of_shards(tmp_path: Path) -> None:
    for index in range(2):
        metadata = {
            **files.LLAMA_METADATA,
            "split.no": files.u16(index),
            "split.count": files.u16(2),
            "split.tensors.count": files.i32(2),
        }
        content = files.gguf_bytes(metadata, [files.Tensor(f"t{index}", (8,), 0, bytes(32))])
        files.write(tmp_path, content, f"model-0000{index + 1}-of-00002.gguf")
    assert list(open_checkpoint(tmp_path).tensors) == ["t0", "t1"]


def test_a_directory_with_several_ggufs(gguf_path: Path) -> None:
    gguf_path.with_name("other.gguf").write_bytes(gguf_path.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 GGUF models.*model\.gguf, other\.gguf"):
        open_checkpoint(gguf_path.parent)


def test_a_safetensors_directory(tmp_path: Path) -> None:
    add_safetensors(tmp_path)
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)


def test_a_directory_with_both(gguf_path: Path) -> None:
    add_safetensors(gguf_path.parent)
    assert isinstance(open_checkpoint(gguf_path.parent), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(gguf_path), GgufCheckpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_directory(tmp_path: Path, name: str) -> None:
    add_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="give the directory"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], "holds no model"),
        (["README.md"], "holds no model"),
        (["config.json"], "holds neither"),
        (["model.safetensors"], "empty"),
        (["pytorch_model.bin"], "never loads pickle"),
    ],
)
def test_a_directory_without_a_checkpoint(tmp_path: Path, names: list[str], found: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=found):
        open_checkpoint(tmp_path)


def test_a_pickle_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="never loads pickle"):
        open_checkpoint(files.write(tmp_path, b"PK\x03\x04", "pytorch_model.bin"))


@pytest.mark.parametrize("name", ["nowhere", "x" * 5000, "null\0byte", ""])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name if name else tmp_path / "dangling"
    if not name:
        path.symlink_to(tmp_path / "gone")
    expected = ModelNotFoundError if name else CheckpointError
    with pytest.raises(expected, match=r"[nN]o such file"):
        open_checkpoint(path)
