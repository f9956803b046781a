"""Safetensors directories: what is read, and how every kind of damage is reported."""

from __future__ import annotations

import json
import math
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from pocketllm.checkpoint import json_objects
from pocketllm.checkpoint.quant import dequantize, integers
from pocketllm.checkpoint.safetensors import SafetensorsCheckpoint
from pocketllm.errors import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 8}
TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]


def pack(header: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file, with a header as given or a length that lies."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: Any, end: Any, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def row(fill: int) -> bytes:
    return bytes([fill]) * 32


def one_tensor(name: str, fill: int) -> bytes:
    return pack({name: entry(0, 32, [8])}, row(fill))


def checkpoint_directory(directory: Path, /, **contents: bytes | str | dict[str, Any] | None) -> Path:
    """Write files given by name, with `__` for a dot; None leaves out the config that is there by default."""
    files = {"config__json": CONFIG, **contents}
    for name, content in files.items():
        if content is None:
            continue
        text = json.dumps(content) if isinstance(content, dict) else content
        path = directory / name.replace("__", ".")
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return directory


def refusal(directory: Path) -> str:
    """The message with which a directory is refused; no refusal may take noticeable memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            SafetensorsCheckpoint(directory)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(directory) in message
    assert len(message) < 2000
    return message


def assert_reads_like_safetensors(directory: Path, shards: list[Path]) -> None:
    with SafetensorsCheckpoint(directory) as checkpoint:
        count = 0
        for shard in shards:
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    expected, tensor = file.get_tensor(name), checkpoint.tensor(name)
                    info = checkpoint.tensors[name]
                    assert info.shape == tensor.shape == tuple(expected.shape)
                    assert info.nbytes == tensor.data.nbytes == expected.nbytes
                    assert not tensor.data.flags.writeable
                    if expected.dtype.is_floating_point:
                        np.testing.assert_array_equal(dequantize(tensor), expected.float().numpy())
                    else:
                        np.testing.assert_array_equal(integers(tensor), expected.numpy())
                    count += 1
        assert len(checkpoint.tensors) == count


# What is read

tensors = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(TORCH_DTYPES), st.lists(st.integers(0, 5), max_size=4)),
    max_size=6,
)


@given(tensors=tensors, seed=st.integers(0, 2**31))
def test_random_files_of_the_safetensors_package_read_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[torch.dtype, list[int]]], seed: int
) -> None:
    directory = checkpoint_directory(tmp_path_factory.mktemp("random"))
    generator = torch.Generator().manual_seed(seed)
    content = {
        name: (100 * torch.randn(shape, generator=generator)).to(dtype) for name, (dtype, shape) in tensors.items()
    }
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    assert_reads_like_safetensors(directory, [directory / "model.safetensors"])


def test_the_golden_checkpoints_read_back() -> None:
    """All there are: none when the fixtures are not at hand, where the test above stands alone."""
    fixtures = os.environ.get("POCKETLLM_FIXTURES")
    for config in sorted(Path(fixtures).glob("tiny/*/config.json")) if fixtures else []:
        directory = config.parent
        assert_reads_like_safetensors(directory, sorted(directory.glob("model*.safetensors")))
        checkpoint = SafetensorsCheckpoint(directory)
        assert checkpoint.config == json.loads(config.read_text())
        assert checkpoint.generation_config == json.loads((directory / "generation_config.json").read_text())


def test_attributes(tmp_path: Path) -> None:
    checkpoint_directory(tmp_path, model__safetensors=one_tensor("a", 1))
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert checkpoint.naming == "hf"
        assert checkpoint.config == CONFIG
        assert checkpoint.model_type == "llama"
        assert checkpoint.generation_config == {}
        tensor = checkpoint.tensor("a")
    assert tensor.data.tobytes() == row(1)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensor("a")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint_directory(tmp_path, model__safetensors=one_tensor("model.norm.weight", 1))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint.tensors
    with pytest.raises(CheckpointError, match=r"missing tensor 'norm\.weight'.*nearest name is 'model\.norm\.weight'"):
        checkpoint.tensor("norm.weight")


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    text = '{"model_type": "x", "a": [0.0, Infinity], "b": -Infinity, "c": {"__float__": "Infinity"}, "d": NaN}'
    checkpoint_directory(tmp_path, config__json=text, model__safetensors=one_tensor("a", 1))
    config = SafetensorsCheckpoint(tmp_path).config
    assert config["a"] == [0.0, math.inf]
    assert config["b"] == -math.inf
    assert config["c"] == math.inf
    assert math.isnan(config["d"])


# Configuration


def test_an_absent_config_is_named(tmp_path: Path) -> None:
    checkpoint_directory(tmp_path, config__json=None, model__safetensors=one_tensor("a", 1))
    assert "config.json" in refusal(tmp_path)


def test_an_absent_directory_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config__json", "generation_config__json"])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "empty"),
        (b"{", "no valid JSON"),
        (b"[1, 2]", "no object"),
        (b'"model_type"', "no object"),
        (b'{"a": "\xff"}', "no valid JSON"),
        (b"<html>404</html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' twice"),
        (b'{"a": ' + b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "no valid JSON"),
        (b'{"model_type": "llama", "a": ' + b" " * json_objects.MAX_JSON_BYTES + b"1}", "bytes of JSON"),
    ],
)
def test_damaged_json_is_refused(tmp_path: Path, name: str, text: bytes, found: str) -> None:
    checkpoint_directory(tmp_path, **{"model__safetensors": one_tensor("a", 1), name: text})
    message = refusal(tmp_path)
    assert found in message
    assert name.replace("__", ".") in message


@pytest.mark.parametrize("config", [{}, {"model_type": ""}, {"model_type": None}, {"model_type": 3}])
def test_the_model_type_is_needed(tmp_path: Path, config: dict[str, Any]) -> None:
    checkpoint_directory(tmp_path, config__json=config, model__safetensors=one_tensor("a", 1))
    assert "'model_type'" in refusal(tmp_path)


# Which files hold the weights


def test_no_weights(tmp_path: Path) -> None:
    assert "neither model.safetensors nor" in refusal(checkpoint_directory(tmp_path))


def test_weights_by_another_name(tmp_path: Path) -> None:
    checkpoint_directory(tmp_path, adapter_model__safetensors=one_tensor("a", 1))
    assert "adapter_model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model__bin", "consolidated__00__pth", "model__pt"])
def test_pickles_are_never_loaded(tmp_path: Path, name: str) -> None:
    message = refusal(checkpoint_directory(tmp_path, **{name: b"PK\x03\x04"}))
    assert name.replace("__", ".") in message
    assert "never loads pickle" in message
    assert "safe_serialization" in message


SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(directory: Path, /, **changed: bytes | str | dict[str, Any] | None) -> Path:
    index = {"metadata": {"total_size": 64}, "weight_map": {"a": SHARD_1, "b": SHARD_2}}
    contents: dict[str, Any] = {
        SHARD_1.replace(".", "__"): one_tensor("a", 1),
        SHARD_2.replace(".", "__"): one_tensor("b", 2),
        "model__safetensors__index__json": index,
    }
    return checkpoint_directory(directory, **{**contents, **changed})


def index(**parts: Any) -> dict[str, Any]:
    return {"model__safetensors__index__json": parts}


@pytest.mark.parametrize("stray", ["model__safetensors", "model-00003-of-00003__safetensors"])
def test_only_files_of_the_index_are_read(tmp_path: Path, stray: str) -> None:
    checkpoint = SafetensorsCheckpoint(sharded(tmp_path, **{stray: one_tensor("a", 9)}))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensor("a").data.tobytes() == row(1)
    assert checkpoint.tensor("b").data.tobytes() == row(2)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    message = refusal(sharded(tmp_path, **index(weight_map={"a": SHARD_1, "b": "gone.safetensors"})))
    assert "gone.safetensors" in message
    assert "missing" in message


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    message = refusal(sharded(tmp_path, **{SHARD_2.replace(".", "__"): one_tensor("b", 2)[:-1]}))
    assert SHARD_2 in message
    assert "incomplete" in message


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"weight_map": {"a": SHARD_1, "b": SHARD_2, "c": SHARD_2}}, "'c' is listed in"),
        ({"weight_map": {"a": SHARD_1}}, None),
        ({"weight_map": {"a": SHARD_2, "b": SHARD_2}}, "'a' is listed in"),
        ({"weight_map": {"b": SHARD_2, "c": SHARD_1}}, "'c' is listed in"),
        ({"weight_map": {}}, "'weight_map' is missing"),
        ({"weight_map": [SHARD_1]}, "'weight_map' is missing"),
        ({}, "'weight_map' is missing"),
        ({"weight_map": {"a": "../model.safetensors"}}, "no name of a .safetensors file"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no name of a .safetensors file"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "no name of a .safetensors file"),
        ({"weight_map": {"a": 1}}, "no name of a .safetensors file"),
        ({"weight_map": {"a": "x" * 300 + ".safetensors"}}, "missing"),
        ({"weight_map": {"a": SHARD_1, "b": SHARD_2}, "metadata": {"total_size": 65}}, "'metadata.total_size'"),
        ({"weight_map": {"a": SHARD_1, "b": SHARD_2}, "metadata": {"total_size": 32}}, None),
        ({"weight_map": {"a": SHARD_1, "b": SHARD_2}, "metadata": None}, None),
    ],
)
def test_an_index_that_disagrees_is_refused(tmp_path: Path, parts: dict[str, Any], found: str | None) -> None:
    sharded(tmp_path, **index(**parts))
    if found is None:
        SafetensorsCheckpoint(tmp_path)
    else:
        message = refusal(tmp_path)
        assert found in message
        assert "model.safetensors.index.json" in message


def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    shard = pack({"b": entry(0, 32, [8]), "extra": entry(32, 64, [8])}, row(2) * 2)
    assert "'extra' is in model-00002" in refusal(sharded(tmp_path, **{SHARD_2.replace(".", "__"): shard}))
    shard = pack({"b": entry(0, 32, [8]), "a": entry(32, 64, [8])}, row(2) * 2)
    message = refusal(sharded(tmp_path, **{SHARD_2.replace(".", "__"): shard}))
    assert f"lists it in {SHARD_1}" in message


# The header of a file


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (b"<!doctype html><p>401", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04 and more", "never loads pickle"),
        (b"GGUF\x03\0\0\0" + bytes(16), "GGUF file"),
        (one_tensor("a", 1)[:7], "no safetensors file"),
        (one_tensor("a", 1)[:30], "incomplete"),
        (one_tensor("a", 1)[:-1], "incomplete"),
        (one_tensor("a", 1) + b"\0", "only at"),
        (pack({}, length=2**60), "larger than any"),
        (pack({}, length=2**64 - 1), "larger than any"),
        (pack({}, length=2**24), "incomplete"),
        (pack(b"{" + b" " * 50), "no valid JSON"),
        (pack(b'{"a":' * 50_000), "nested too deep"),
        (pack(b'{"a":1,"a":1}'), "'a' twice"),
        (pack(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "'dtype' twice"),
        (pack({"n" * 2000: entry(0, 32, [8])}, row(1)), "2000 letters"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, found: str) -> None:
    message = refusal(checkpoint_directory(tmp_path, model__safetensors=content))
    assert found in message
    assert "model.safetensors" in message


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({"t": 1}, "no dtype"),
        ({"t": "dtype"}, "no dtype"),
        ({"t": []}, "no dtype"),
        ({"t": {"dtype": "F32", "shape": [8]}}, "no dtype"),
        ({"t": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32, 64]}}, "no dtype"),
        ({"t": {"dtype": "F32", "shape": [8], "data_offsets": 32}}, "no dtype"),
        ({"t": {"__float__": "NaN"}}, "no dtype"),
        ({"t": entry(0, 32, [32], "F8_E4M3")}, "'F8_E4M3', which is not supported. Supported: F32, F16, BF16"),
        ({"t": entry(0, 32, [32], "I8")}, "'I8', which is not supported"),
        ({"t": entry(0, 32, [8], ["F32"])}, "not supported"),
        ({"t": entry(0, 32, "8")}, "integers from 0 on"),
        ({"t": entry(0, 32, None)}, "integers from 0 on"),
        ({"t": entry(0, 32, [8.0])}, "integers from 0 on"),
        ({"t": entry(0, 32, [True, 8])}, "integers from 0 on"),
        ({"t": entry(0, 32, [-8])}, "integers from 0 on"),
        ({"t": entry(0, "32", [8])}, "integers from 0 on"),
        ({"t": entry(-32, 0, [8])}, "integers from 0 on"),
        ({"t": entry(0, 32, [8] + [1] * 32)}, "integers from 0 on"),
        ({"t": entry(0, 32, [1] * 100_000)}, "integers from 0 on"),
        ({"t": entry(0, 32, [9])}, "does not fill"),
        ({"t": entry(32, 0, [8])}, "does not fill"),
        ({"t": entry(0, 0, [2**62, 2])}, "does not fill"),
        ({"t": entry(0, 0, [2**62, 0])}, "does not fill"),
        ({"t": entry(0, 2**64, [2**62])}, "does not fill"),
        ({"t": entry(0, 2**40, [2**38])}, "incomplete"),
        ({"t": entry(4, 36, [8])}, "leaves a hole"),
        ({"t": entry(0, 32, [8]), "u": entry(16, 48, [8])}, "overlaps"),
        ({"t": entry(0, 32, [8]), "u": entry(0, 32, [8])}, "overlaps"),
        ({"t": entry(0, 16, [4]), "u": entry(32, 48, [4])}, "leaves a hole"),
    ],
)
def test_damaged_entries_name_the_tensor(tmp_path: Path, entries: dict[str, Any], found: str) -> None:
    message = refusal(checkpoint_directory(tmp_path, model__safetensors=pack(entries, bytes(64))))
    assert found in message
    assert "'t'" in message or "'u'" in message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = pack({"a": entry(0, 32, [8]), "b": entry(32, 64, [2, 4])}, row(1) * 2)
    for size in range(len(content)):
        refusal(checkpoint_directory(tmp_path, model__safetensors=content[:size]))


SMALL = pack({"a": entry(0, 32, [8]), "b": entry(32, 48, [2, 4], "BF16"), "c": entry(48, 64, [2], "I64")}, bytes(64))


@given(at=st.integers(0, len(SMALL) - 65), byte=st.integers(0, 255), other=st.integers(0, len(SMALL) - 65))
def test_a_damaged_header_is_refused_or_read_like_the_package(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, other: int
) -> None:
    damaged = bytearray(SMALL)
    damaged[at], damaged[other] = byte, damaged[at]
    directory = checkpoint_directory(tmp_path_factory.mktemp("damaged"), model__safetensors=bytes(damaged))
    try:
        SafetensorsCheckpoint(directory).close()
    except CheckpointError:
        return
    assert_reads_like_safetensors(directory, [directory / "model.safetensors"])
