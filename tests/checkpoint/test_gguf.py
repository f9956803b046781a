"""GGUF files: what is read, and how every kind of damage is reported."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.checkpoint import gguf_header
from pocketllm.checkpoint.gguf import GgufCheckpoint
from pocketllm.checkpoint.quant import FORMATS, dequantize
from pocketllm.errors import CheckpointError

from . import gguf_files as files
from .gguf_files import LLAMA_METADATA, Tensor, TypedValue, gguf_bytes, pack_entry, pack_file, pack_key, write

KEYS = [pack_key(name, value) for name, value in LLAMA_METADATA.items()]
F32, Q4_1 = 0, 3


def with_tensors(*entries: bytes, data: bytes = bytes(4096), **parts: Any) -> bytes:
    return pack_file(KEYS, entries, data, **parts)


def with_key(key: bytes, **parts: Any) -> bytes:
    return pack_file([*KEYS, key], [], b"", **parts)


def refusal(path: Path) -> str:
    """The message with which a file is refused; no refusal may take noticeable memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            GgufCheckpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(path.parent) in message
    assert len(message) < 2000
    return message


# What is read


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_equal_the_gguf_package(tmp_path: Path, version: int) -> None:
    content = bytearray(files.tiny_llama())
    content[4:8] = struct.pack("<I", version)
    path = write(tmp_path, bytes(content))
    reader = gguf.GGUFReader(path)
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.path == path
        assert checkpoint.naming == "gguf"
        assert checkpoint.model_type == "llama"
        assert checkpoint.generation_config == {}
        assert list(checkpoint.tensors) == [tensor.name for tensor in reader.tensors]
        for expected in reader.tensors:
            info, tensor = checkpoint.tensors[expected.name], checkpoint.tensor(expected.name)
            assert info.shape == tensor.shape == tuple(reversed(expected.shape.tolist()))
            assert info.format == tensor.format == expected.tensor_type.name
            assert info.nbytes == expected.n_bytes == tensor.data.nbytes
            assert tensor.data.tobytes() == expected.data.tobytes()
            assert not tensor.data.flags.writeable
        for key, value in checkpoint.config.items():
            field = reader.get_field(key)
            assert field is not None
            assert value == field.contents()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(
    tensors=st.dictionaries(names, st.tuples(st.sampled_from(list(FORMATS)), shapes), max_size=6),
    alignment=st.sampled_from([8, 32, 256]),
    strings=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1),
    numbers=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1),
)
def test_random_files_of_the_gguf_package_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, list[int]]],
    alignment: int,
    strings: list[str],
    numbers: list[int],
) -> None:
    path = tmp_path_factory.mktemp("random") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_array("strings", strings)
    writer.add_array("numbers", numbers)
    writer.add_uint64("big", 2**64 - 1)
    writer.add_float64("small", 2.0**-1000)
    writer.add_bool("yes", True)
    rng = np.random.default_rng(len(tensors))
    expected = {}
    for name, (format, shape) in tensors.items():
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] * FORMATS[format].block_bytes), np.uint8)
        logical = (*shape[:-1], shape[-1] * FORMATS[format].block_values)
        expected[name] = format, logical, data
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config["strings"] == strings
    assert checkpoint.config["numbers"] == numbers
    assert checkpoint.config["big"] == 2**64 - 1
    assert checkpoint.config["small"] == 2.0**-1000
    assert checkpoint.config["yes"] is True
    assert checkpoint.tensors.keys() == expected.keys()
    for name, (format, shape, data) in expected.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.format, tensor.shape) == (format, shape)
        assert tensor.data.tobytes() == data.tobytes()


def test_every_metadata_type(tmp_path: Path) -> None:
    values = {
        "u8": TypedValue(files.UINT8, 255),
        "i8": TypedValue(files.INT8, -128),
        "u16": TypedValue(files.UINT16, 65535),
        "i16": TypedValue(files.INT16, -32768),
        "u32": TypedValue(files.UINT32, 2**32 - 1),
        "i32": TypedValue(files.INT32, -(2**31)),
        "u64": TypedValue(files.UINT64, 2**64 - 1),
        "i64": TypedValue(files.INT64, -(2**63)),
        "f32": TypedValue(files.FLOAT32, 0.5),
        "f64": TypedValue(files.FLOAT64, 1e300),
        "bool": TypedValue(files.BOOL, True),
        "string": files.text("naïve \x00 日本語"),
        "empty": files.array(files.STRING, []),
        "bools": files.array(files.BOOL, [True, False]),
        "nested": files.array(files.ARRAY, [files.array(files.UINT8, [1, 2]), files.array(files.STRING, ["x"])]),
    }
    config = GgufCheckpoint(write(tmp_path, gguf_bytes({**LLAMA_METADATA, **values}, []))).config
    for key, value in values.items():
        if key != "nested":
            assert config[key] == value.value
            assert type(config[key]) is type(value.value)
    assert config["nested"] == [[1, 2], ["x"]]


@pytest.mark.parametrize("output", [False, True])
def test_a_tied_output_is_seen_by_its_absence(tmp_path: Path, output: bool) -> None:
    checkpoint = GgufCheckpoint(write(tmp_path, files.tiny_llama(output=output)))
    assert ("output.weight" in checkpoint.tensors) == output


def test_an_unneeded_tensor_is_listed_like_any_other(tmp_path: Path) -> None:
    factors = np.full(8, 8.0, np.float32)
    path = write(tmp_path, gguf_bytes(LLAMA_METADATA, [Tensor("rope_freqs.weight", (8,), F32, factors.tobytes())]))
    np.testing.assert_array_equal(dequantize(GgufCheckpoint(path).tensor("rope_freqs.weight")), factors)


def test_a_large_vocabulary(tmp_path: Path) -> None:
    tokens = [f"<{index}>" for index in range(300_000)]
    metadata = {**LLAMA_METADATA, "tokenizer.ggml.tokens": files.array(files.STRING, tokens)}
    assert GgufCheckpoint(write(tmp_path, gguf_bytes(metadata, []))).config["tokenizer.ggml.tokens"] == tokens


def test_tensors_in_another_order_than_their_data(tmp_path: Path) -> None:
    entries = pack_entry("b", (16,), F32, 64), pack_entry("a", (16,), F32, 0)
    path = write(tmp_path, with_tensors(*entries, data=bytes(64) + b"\1" * 64))
    checkpoint = GgufCheckpoint(path)
    assert not checkpoint.tensor("a").data.any()
    assert checkpoint.tensor("b").data.all()


def test_views_outlive_closing(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write(tmp_path, files.tiny_llama()))
    tensor = checkpoint.tensor("output_norm.weight")
    before = tensor.data.tobytes()
    checkpoint.close()
    checkpoint.close()
    assert tensor.data.tobytes() == before
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.tensor("output_norm.weight")


# What the file is instead


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>404</html>", "HTML page"),
        (b"\n  <HTML>Sign in</HTML>", "HTML page"),
        (b'<?xml version="1.0"?><Error/>', "XML document"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"PK\x03\x04rest", "never loads pickle"),
        (b"\x80\x02}q\x00.", "never loads pickle"),
        (struct.pack("<Q", 2) + b"{}", "safetensors file"),
        (b"tjgg\x03\0\0\0", "before GGUF"),
        (b"Repository not found\n", "'Repository not found'"),
        (bytes(4096), "zero bytes"),
        (b"\xfe\xed\xfa\xce1234", "fe ed fa ce"),
        (b"GGU", "GGU"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    message = refusal(write(tmp_path, content))
    assert "no GGUF file" in message
    assert found in message


def test_a_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    assert "folder" in refusal(folder)


def test_a_device_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no regular file"):
        GgufCheckpoint("/dev/zero")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, files.tiny_llama())

    def refuse(*_: object) -> None:  # chmod does not stop a test that runs as root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert "no permission" in refusal(path)


@pytest.mark.parametrize(
    ("version", "found"),
    [(1, "version 1 is not read"), (4, "version 4 is not read"), (3 << 24, "big-endian"), (2 << 24, "big-endian")],
)
def test_other_versions_are_named(tmp_path: Path, version: int, found: str) -> None:
    assert found in refusal(write(tmp_path, pack_file(KEYS, [], b"", version=version)))


# Cut short


def test_every_truncation_of_the_header_is_refused(tmp_path: Path) -> None:
    content = gguf_bytes(LLAMA_METADATA, [Tensor("a", (4,), F32, bytes(16))])
    for size in range(5, len(content) - 16):
        message = refusal(write(tmp_path, content[:size]))
        assert f"ends at byte {size}" in message


def test_truncated_data_names_tensor_and_bytes(tmp_path: Path) -> None:
    content = files.tiny_llama()
    message = refusal(write(tmp_path, content[:-200]))
    assert "'output_norm.weight'" in message
    assert f"ends at byte {len(content) - 200}" in message
    assert "download is incomplete" in message


def test_missing_tensor_is_told_apart_from_truncation(tmp_path: Path) -> None:
    content = files.tiny_llama().replace(b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight")
    checkpoint = GgufCheckpoint(write(tmp_path, content))
    with pytest.raises(
        CheckpointError, match=r"missing tensor 'blk\.1\.attn_q\.weight'.*nearest name is 'blk"
    ) as error:
        checkpoint.tensor("blk.1.attn_q.weight")
    assert "incomplete" not in str(error.value)
    with pytest.raises(CheckpointError, match="missing tensor '日本'"):
        checkpoint.tensor("日本")


# Crafted and damaged


@pytest.mark.parametrize("count", [2**20, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
@pytest.mark.parametrize("which", ["key_count", "tensor_count"])
def test_absurd_counts_fail_at_once(tmp_path: Path, which: str, count: int) -> None:
    message = refusal(write(tmp_path, with_tensors(data=bytes(1 << 20), **{which: count})))
    assert f"{count}" in message


@pytest.mark.parametrize("count", [2**21 + 1, 2**32, 2**61, 2**64 - 1])
@pytest.mark.parametrize("item", [files.UINT8, files.FLOAT64, files.BOOL, files.STRING, files.ARRAY])
def test_absurd_arrays_fail_at_once(tmp_path: Path, item: int, count: int) -> None:
    key = files.pack_string("tokens") + struct.pack("<IIQ", files.ARRAY, item, count)
    message = refusal(write(tmp_path, with_key(key)))
    assert "'tokens'" in message


@pytest.mark.parametrize("length", [1000, 2**31, 2**61, 2**63, 2**64 - 1])
def test_absurd_string_lengths_fail_at_once(tmp_path: Path, length: int) -> None:
    absurd = struct.pack("<Q", length) + b"abc"
    key = files.pack_string("key") + struct.pack("<I", files.STRING) + absurd
    assert "'key' needs bytes up to" in refusal(write(tmp_path, with_key(key)))
    assert "name of metadata key 10" in refusal(write(tmp_path, with_key(absurd)))
    assert "name of tensor 0" in refusal(write(tmp_path, pack_file(KEYS, [absurd], bytes(64))))


def test_counts_that_the_file_could_hold_are_limited(tmp_path: Path) -> None:
    """Zeros are valid names, strings and values, so a sparse file could hold any count of them."""
    path = write(tmp_path, with_key(files.pack_string("zeros") + struct.pack("<IIQ", files.ARRAY, files.STRING, 2**30)))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert "'zeros'" in refusal(path)
    path = write(tmp_path, with_tensors(key_count=2**20))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert "metadata keys" in refusal(path)
    path = write(tmp_path, with_tensors(tensor_count=2**20))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert "tensors" in refusal(path)


def test_a_header_has_an_end(tmp_path: Path) -> None:
    key = files.pack_string("long") + struct.pack("<IQ", files.STRING, gguf_header.MAX_HEADER_BYTES)
    path = write(tmp_path, with_key(key))
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    assert "where every header ends" in refusal(path)


def test_a_text_has_a_longest_length(tmp_path: Path) -> None:
    key = files.pack_string("long") + struct.pack("<IQ", files.STRING, gguf_header.MAX_STRING_BYTES + 1)
    path = write(tmp_path, with_key(key))
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    assert "'long' is a text of" in refusal(path)


def test_nesting_is_bounded(tmp_path: Path) -> None:
    nest = struct.pack("<IQ", files.ARRAY, 1)
    key = files.pack_string("bomb") + struct.pack("<I", files.ARRAY) + nest * 10_000
    assert "nested more than 4 deep" in refusal(write(tmp_path, with_key(key)))


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (pack_key("llama.block_count", files.u32(3)), "'llama.block_count' is there twice"),
        (pack_key(b"\xff\xfe", files.u32(3)), "no UTF-8"),
        (files.pack_string("k") + struct.pack("<I", files.STRING) + files.pack_string(b"a\xc3"), "'k' is no UTF-8"),
        (files.pack_string("k") + struct.pack("<II", 13, 0), "'k' is of unknown value type 13"),
        (files.pack_string("k") + struct.pack("<IIQ", files.ARRAY, 99, 0), "'k' is of unknown value type 99"),
        (files.pack_string("k") + struct.pack("<IB", files.BOOL, 2), "'k' is a bool"),
        (pack_key("k" * 5000, files.u32(3)), "5000 bytes long"),
        (pack_key("general.alignment", files.u32(0)), "'general.alignment' is 0"),
        (pack_key("general.alignment", files.u32(48)), "'general.alignment' is 48"),
        (pack_key("general.alignment", files.text("32")), "'general.alignment' is '32'"),
    ],
)
def test_damaged_keys_are_named(tmp_path: Path, key: bytes, found: str) -> None:
    assert found in refusal(write(tmp_path, with_key(key)))


@pytest.mark.parametrize("value", [None, files.text(""), files.u32(1)])
def test_the_architecture_is_needed(tmp_path: Path, value: TypedValue | None) -> None:
    metadata = {} if value is None else {"general.architecture": value}
    assert "general.architecture" in refusal(write(tmp_path, gguf_bytes(metadata, [])))


@pytest.mark.parametrize(
    ("kind", "name"), [(9, "Q8_1"), (16, "IQ2_XXS"), (34, "TQ1_0"), (39, "MXFP4"), (28, "F64"), (250, "no known type")]
)
def test_unknown_tensor_types_are_named(tmp_path: Path, kind: int, name: str) -> None:
    message = refusal(write(tmp_path, with_tensors(pack_entry("blk.0.x", (256,), kind, 0))))
    assert "'blk.0.x'" in message
    assert f"type {kind}" in message
    assert name in message
    assert all(supported in message for supported in FORMATS)


def test_a_wrong_but_known_type_shows_in_the_places(tmp_path: Path) -> None:
    entries = pack_entry("a", (64,), 20, 0), pack_entry("b", (64,), Q4_1, 64)  # IQ4_NL takes 36 bytes, Q4_1 40
    GgufCheckpoint(write(tmp_path, with_tensors(*entries)))
    entries = pack_entry("a", (1024,), 20, 0), pack_entry("b", (64,), Q4_1, 640)
    assert "'a' (IQ4_NL" in refusal(write(tmp_path, with_tensors(*entries)))


@pytest.mark.parametrize("shape", [(2, 2**63), (576, 2**42 + 1), (2**32, 2**32), (2**16,) * 4, (2**64 - 1, 32)])
@pytest.mark.parametrize("kind", [F32, Q4_1])
def test_products_do_not_wrap_round(tmp_path: Path, shape: tuple[int, ...], kind: int) -> None:
    message = refusal(write(tmp_path, with_tensors(pack_entry("wide", shape, kind, 0))))
    assert "'wide'" in message
    assert str(shape) in message


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (pack_entry("t", (1, 1, 1, 1, 1), F32, 0), "5 dimensions"),
        (files.pack_string("t") + struct.pack("<I", 2**32 - 1), "4294967295 dimensions"),
        (pack_entry("t", (0,), F32, 0), "empty shape"),
        (pack_entry("t", (4, 0, 2), F32, 0), "empty shape"),
        (pack_entry("t", (2, 33), Q4_1, 0), "no multiple of Q4_1's block of 32"),
        (pack_entry("t", (4,), F32, 8), "no multiple of the alignment"),
        (pack_entry("t", (4,), F32, 4096), "ends at byte"),
        (pack_entry("t", (4,), F32, 2**64 - 32), "ends at byte"),
        (pack_entry("t", (4,), F32, 32), "leaves a hole"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, entry: bytes, found: str) -> None:
    message = refusal(write(tmp_path, with_tensors(entry)))
    assert "'t'" in message
    assert found in message


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    entries = pack_entry("a", (16,), F32, 0), pack_entry("b", (16,), F32, 32)
    message = refusal(write(tmp_path, with_tensors(*entries)))
    assert "'a'" in message
    assert "'b'" in message
    assert "overlaps" in message


def test_a_repeated_tensor_is_refused(tmp_path: Path) -> None:
    entries = pack_entry("a", (8,), F32, 0), pack_entry("a", (8,), F32, 32)
    assert "'a' is there twice" in refusal(write(tmp_path, with_tensors(*entries)))


# Split files


def shard(index: int, count: int, total: int, /, *tensors: Tensor, **changed: TypedValue | None) -> bytes:
    keys: dict[str, TypedValue | None] = {
        **(LLAMA_METADATA if index == 0 else {}),
        "split.no": files.u16(index),
        "split.count": files.u16(count),
        "split.tensors.count": files.i32(total),
        **{f"split.{key}": value for key, value in changed.items()},
    }
    return gguf_bytes({key: value for key, value in keys.items() if value is not None}, tensors)


def row(name: str, fill: int) -> Tensor:
    return Tensor(name, (8,), F32, bytes([fill]) * 32)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    contents = shard(0, 3, 3, row("a", 1)), shard(1, 3, 3, row("b", 2)), shard(2, 3, 3, row("c", 3))
    return [write(tmp_path, content, f"m-0000{i + 1}-of-00003.gguf") for i, content in enumerate(contents)]


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_shard_opens_all(shards: list[Path], opened: int) -> None:
    checkpoint = GgufCheckpoint(shards[opened])
    assert checkpoint.path == shards[0]
    assert checkpoint.model_type == "llama"
    assert [checkpoint.tensor(name).data[0, 0] for name in "abc"] == [1, 2, 3]


def test_the_first_shard_may_hold_no_tensor(shards: list[Path]) -> None:
    shards[0].write_bytes(shard(0, 3, 2))
    shards[1].write_bytes(shard(1, 3, 2, row("b", 2)))
    shards[2].write_bytes(shard(2, 3, 2, row("c", 3)))
    assert list(GgufCheckpoint(shards[0]).tensors) == ["b", "c"]


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    message = refusal(shards[2])
    assert "m-00002-of-00003.gguf" in message
    assert "missing" in message


def test_a_renamed_shard_is_refused(shards: list[Path]) -> None:
    assert "names" in refusal(shards[0].rename(shards[0].with_name("model.gguf")))


@pytest.mark.parametrize(
    ("index", "content", "found"),
    [
        (1, shard(1, 3, 3, row("b", 2), no=files.u16(2)), "'split.no' says 2, but 1"),
        (1, shard(1, 3, 3, row("b", 2), no=None), "'split.no' is missing"),
        (1, shard(1, 3, 3, row("b", 2), count=files.u16(4)), "'split.count' says 4, but 3"),
        (2, shard(2, 3, 3, row("c", 2), **{"tensors.count": files.i32(4)}), "'split.tensors.count' says 4, but 3"),
        (2, shard(2, 3, 3), "'split.tensors.count' says 3, but 2"),
        (2, shard(2, 3, 3, row("a", 2)), "'a' is in m-00001-of-00003.gguf too"),
        (0, shard(0, 3, 3, row("a", 2), count=files.text("3")), "'split.count' is '3'"),
        (1, shard(1, 3, 3, row("b", 2))[:-1], "ends at byte"),
        (1, b"", "empty"),
    ],
)
def test_disagreeing_shards_are_refused(shards: list[Path], index: int, content: bytes, found: str) -> None:
    shards[index].write_bytes(content)
    assert found in refusal(shards[0])
