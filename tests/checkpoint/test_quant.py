"""Formats against the `gguf` package and NumPy, bit for bit."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.checkpoint.quant import FORMATS, UNSUPPORTED_GGUF_TYPES, QuantTensor, dequantize, integers

INTEGER_FORMATS = ("I32", "I64")
FLOAT_FORMATS = [name for name in FORMATS if name not in INTEGER_FORMATS]


def stored(data: np.ndarray, format: str, shape: tuple[int, ...]) -> QuantTensor:
    columns = shape[-1] if shape else 1
    return QuantTensor(data.reshape(-1, FORMATS[format].row_bytes(columns)), format, shape)


def reference(data: np.ndarray, format: str, shape: tuple[int, ...]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(data, gguf.GGMLQuantizationType[format]).reshape(shape)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_formats_agree_with_the_gguf_package() -> None:
    for name, format in FORMATS.items():
        kind = gguf.GGMLQuantizationType(format.gguf_type)
        assert kind.name == name == format.name
        assert gguf.GGML_QUANT_SIZES[kind] == (format.block_values, format.block_bytes)
    named = {**{format.gguf_type: name for name, format in FORMATS.items()}, **UNSUPPORTED_GGUF_TYPES}
    assert {int(kind): kind.name for kind in gguf.GGMLQuantizationType}.items() <= named.items()
    assert len(named) == len(FORMATS) + len(UNSUPPORTED_GGUF_TYPES)


@pytest.mark.parametrize("format", FLOAT_FORMATS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 5))
def test_random_bytes_expand_to_the_same_bits(format: str, seed: int, rows: int, blocks: int) -> None:
    """All bit patterns: infinite and NaN scales, subnormals and negative zeros included."""
    shape = (rows, blocks * FORMATS[format].block_values)
    row_bytes = blocks * FORMATS[format].block_bytes
    data = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)
    assert_same_bits(dequantize(stored(data, format, shape)), reference(data, format, shape))


@pytest.mark.parametrize("format", FLOAT_FORMATS)
def test_more_than_one_slice(format: str) -> None:
    """Sizes past the slice that is expanded at a time, and no multiple of it."""
    columns = 3 * 256
    data = np.random.default_rng(1).integers(0, 256, (257, FORMATS[format].row_bytes(columns)), np.uint8)
    shape = (257, columns)
    assert_same_bits(dequantize(stored(data, format, shape)), reference(data, format, shape))


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"])
def test_weights_come_back_within_the_step_of_the_format(format: str) -> None:
    weights = np.random.default_rng(2).normal(size=(8, 256)).astype(np.float32)
    data = gguf.quantize(weights, gguf.GGMLQuantizationType[format]).view(np.uint8)
    error = np.abs(dequantize(stored(data, format, weights.shape)) - weights).max()
    steps = {"Q4_0": 0.3, "Q4_1": 0.3, "Q5_0": 0.15, "Q5_1": 0.15, "Q8_0": 0.02, "BF16": 0.02, "F16": 0.002, "F32": 0}
    assert error <= steps[format]


@pytest.mark.parametrize("shape", [(), (32,), (2, 3, 32), (0, 32), (4, 0), (1, 1, 1, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    format = "Q8_0" if shape else "F32"
    rows = int(np.prod(shape[:-1]))
    row_bytes = FORMATS[format].row_bytes(shape[-1] if shape else 1)
    tensor = QuantTensor(np.zeros((rows, row_bytes), np.uint8), format, shape)
    assert dequantize(tensor).shape == shape


def test_the_result_is_a_new_array() -> None:
    data = np.zeros((2, 16), np.uint8)
    data.flags.writeable = False
    values = dequantize(QuantTensor(data, "F32", (2, 4)))
    assert values.flags.writeable
    assert not np.shares_memory(values, data)


def test_data_need_not_be_contiguous() -> None:
    wide = np.random.default_rng(3).integers(0, 256, (6, 80), np.uint8)
    part = wide[::2, 20:60]
    assert_same_bits(dequantize(QuantTensor(part, "Q4_1", (3, 64))), reference(part.copy(), "Q4_1", (3, 64)))


@pytest.mark.parametrize("format", FLOAT_FORMATS)
def test_temporary_memory_is_small(format: str) -> None:
    shape = (1024, 4096)
    data = np.zeros((shape[0], FORMATS[format].row_bytes(shape[1])), np.uint8)
    tracemalloc.start()
    try:
        values = dequantize(QuantTensor(data, format, shape))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes + (8 << 20)


@pytest.mark.parametrize(("format", "dtype"), [("I32", np.int32), ("I64", np.int64)])
def test_integers(format: str, dtype: type) -> None:
    limits = np.iinfo(dtype)
    numbers = np.array([[0, -1, 7], [limits.min, limits.max, 2**24 + 1]], dtype)
    tensor = QuantTensor(numbers.view(np.uint8), format, (2, 3))
    values = integers(tensor)
    assert values.dtype == np.int64
    np.testing.assert_array_equal(values, numbers)
    with pytest.raises(ValueError, match=f"{format} cannot be expanded"):
        dequantize(tensor)


def test_integers_refuses_weights() -> None:
    with pytest.raises(ValueError, match="holds no integers"):
        integers(QuantTensor(np.zeros((1, 4), np.uint8), "F32", (1,)))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (QuantTensor(np.zeros((1, 4), np.uint8), "Q9_9", (1,)), "Q9_9 cannot be expanded"),
        (QuantTensor(np.zeros((1, 4), np.uint8), "F32", (1,), layout="tiles"), "layout 'tiles'"),
        (QuantTensor(np.zeros((1, 4), np.uint8), "F32", (2,)), "takes uint8"),
        (QuantTensor(np.zeros((1, 1), np.float32), "F32", (1,)), "float32"),
        (QuantTensor(np.zeros((1, 20), np.uint8), "Q4_1", (33,)), "no multiple"),
    ],
)
def test_misuse_is_refused(tensor: QuantTensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize(tensor)


def test_bits_per_value() -> None:
    assert FORMATS["Q4_1"].bits_per_value == 5.0
    assert FORMATS["Q6_K"].bits_per_value == 6.5625
