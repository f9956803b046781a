"""Products and lookups in CUDA C: the order of sums, bits that depend on the row alone, and what blocks hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from pocketllm.checkpoint.quant import FORMATS, QuantTensor, dequantize
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check, rounded
from pocketllm.kernels.contract import BoundOp
from pocketllm.kernels.jit.cuda_emulator.settings import emulated
from pocketllm.kernels.jit.report_cupy import CAPABILITIES, resources_of
from pocketllm.kernels.jit.toolchain_cupy import recorded_requests
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES
from pocketllm.kernels.quantized_linear.spec import make_weight, quantized_activations
from pocketllm.kernels.registry import spec

Array = npt.NDArray[Any]
CUPY = backend("cupy")
OPS = CUPY.table(FLOAT32)
MODES = pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS_WITH_CODES)

# Tails in each direction. Up to 8 rows are computed by one kernel, more by another.
ROWS, OUTPUTS = 37, 67


def put(array: Any, dtype: str = "float32") -> Any:
    """The backend's copy; a quantised tensor keeps its format."""
    return CUPY.put(array, dtype)


def activations(rows: int, columns: int) -> Array:
    return np.random.default_rng(4).standard_normal((rows, columns), dtype=np.float32)


def product(mode: Mode, format: str | None, columns: int) -> BoundOp:
    """A layer over random weights in that format, or over numbers of the mode where there is none."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((OUTPUTS, columns)) if format is None else make_weight(rng, format, (OUTPUTS, columns))
    bias = rng.standard_normal(OUTPUTS)
    weights = {"weight": put(weight, mode.dtype), "bias": put(bias)}
    return CUPY.table(mode).bind("linear", weights)


@MODES
@pytest.mark.parametrize(("format", "columns"), [(None, 1100), *((name, 512) for name in FORMATS_WITH_CODES)])
def test_rows_of_a_product_stand_alone(mode: Mode, format: str | None, columns: int) -> None:
    op, x = product(mode, format, columns), put(activations(ROWS, columns), mode.dtype)
    together = CUPY.get(op(x))
    for size in (1, 3, 8, 9, 20):
        pieces = [CUPY.get(op(x[start : start + size])) for start in range(0, ROWS, size)]
        np.testing.assert_array_equal(together, np.concatenate(pieces), f"in pieces of {size} rows")


def by_segments(x: Array, weight: Array, segment: int) -> Array:
    """The product: fused multiply-adds from zero within a segment of inputs, then the segments, all ascending."""
    total = np.zeros((len(x), len(weight)), dtype=np.float32)
    for start in range(0, x.shape[1], segment):
        part = np.zeros_like(total)
        for k in range(start, min(start + segment, x.shape[1])):
            # 64 bits of a product that has 48: rounded once, but for ties that no case here has.
            part = (x[:, k, None].astype(np.longdouble) * weight[:, k] + part).astype(np.float32)
        total += part
    return total


@pytest.mark.parametrize("rows", [2, 9])
def test_float_products_are_summed_by_segments(rows: int) -> None:
    weight, x = activations(OUTPUTS, 300)[::-1].copy(), activations(rows, 300)
    out = CUPY.get(OPS.bind("linear", {"weight": put(weight)})(put(x)))
    np.testing.assert_array_equal(out, by_segments(x, weight, 32))
    # The check tells other orders from this one.
    assert not np.array_equal(out, by_segments(x, weight, 16))


@EVERY_FORMAT
@pytest.mark.parametrize("rows", [2, 9])
def test_quantised_products_have_the_bits_of_the_processor(format: str, rows: int) -> None:
    """Numba's order is compared with a definition of its own in `test_numba_bits`."""
    rng = np.random.default_rng(5)
    weight, bias = make_weight(rng, format, (61, 1280)), rng.standard_normal(61, dtype=np.float32)
    x = activations(rows, 1280)
    expected = backend("numba").table(FLOAT32).bind("linear", {"weight": weight, "bias": bias})(x)
    weights = {"weight": put(weight), "bias": put(bias)}
    np.testing.assert_array_equal(CUPY.get(OPS.bind("linear", weights)(put(x))), expected)


def identity(columns: int) -> QuantTensor:
    """The matrix in Q8_0, with the scale one."""
    blocks = np.zeros((columns, columns // 32, 34), dtype=np.uint8)
    blocks[:, :, :2] = np.array([1.0], "<f2").view(np.uint8)
    column = np.arange(columns)
    blocks[column, column // 32, 2 + column % 32] = 1
    return QuantTensor(blocks.reshape(columns, -1), "Q8_0", (columns, columns))


@settings(max_examples=200, deadline=None)
@given(x=arrays_of.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(96)), elements=st.floats(width=32)))
@example(x=np.full((2, 96), 190 * 2.0**-149, dtype=np.float32))  # the scale is the smallest number, the quotient 190
def test_activations_are_rounded_as_the_contract_says(x: Array) -> None:
    op = OPS.bind("linear", {"weight": put(identity(96))})
    with np.errstate(invalid="ignore", over="ignore"):  # infinities of both signs; the largest number, rounded up
        codes, scales = quantized_activations(x)
        expected = codes.astype(np.float32) * scales.repeat(32, axis=1)
    expected[np.isnan(scales).any(axis=1)] = np.nan
    np.testing.assert_array_equal(CUPY.get(op(put(x))), expected)


@MODES
@EVERY_FORMAT
def test_a_table_of_blocks_is_expanded_exactly(format: str, mode: Mode) -> None:
    """Of any bytes, scales among them that are no numbers."""
    shape = (40, 2 * FORMATS[format].block_values)
    data = np.random.default_rng(6).integers(0, 256, size=(40, FORMATS[format].row_bytes(shape[1])), dtype=np.uint8)
    table = QuantTensor(data, format, shape)
    ids = np.array([39, 0, 7, *range(40)], dtype=np.int32)
    lookup = CUPY.table(mode).bind("embedding", {"table": put(table)})
    expected = rounded(dequantize(table)[ids], mode.dtype)
    np.testing.assert_array_equal(CUPY.get(lookup(put(ids, "int32"))), expected)


@pytest.mark.parametrize(("op", "name"), [("linear", "weight"), ("embedding", "table")])
def test_weights_that_are_not_served_are_refused_with_the_reason(op: str, name: str) -> None:
    stored = QuantTensor(np.zeros((4, 512), np.uint8), "F16", (4, 256))
    repacked = QuantTensor(np.zeros((4, 34), np.uint8), "Q8_0", (4, 32), layout="interleaved8")
    for weight, reason in (
        (put(stored), f"the {name} is in format F16: expand it to an array"),
        (put(repacked), f"the {name} has been repacked to layout 'interleaved8'"),
        (put(np.zeros((4, 32)), "float64"), f"the {name} is an array of float64, not of float32"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=reason):
            OPS.bind(op, {name: weight})


@pytest.mark.skipif(CUPY.device != "cpu", reason="the emulator looks for faults; a GPU does not")
@MODES
@pytest.mark.parametrize("op", ["linear", "embedding", "take_rows"])
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_the_kernels_break_no_rule(op: str, mode: Mode, data: st.DataObject, seed: int) -> None:
    contract = spec(op)
    dims = {name: data.draw(st.integers(low, high), label=name) for name, (low, high) in contract.dims.items()}
    with emulated("checked", seed):
        check(contract, contract.make_case(np.random.default_rng(seed), dims), CUPY, mode)


@pytest.mark.skipif(CUPY.device != "cpu", reason="the emulator looks for faults; a GPU does not")
@EVERY_FORMAT
@pytest.mark.parametrize("rows", [3, 9])
def test_the_kernels_of_a_format_break_no_rule(format: str, rows: int) -> None:
    contract, rng = spec("quantized_linear"), np.random.default_rng(7)
    dims = {"T": rows, "N": 21, "blocks": 1100 // FORMATS[format].block_values, "format": 0}
    case = contract.make_case(rng, dims | {"format": FORMATS_WITH_CODES.index(format)})
    ids = put(np.arange(rows, dtype=np.int32), "int32")
    with emulated("checked", rows):
        check(contract, case, CUPY, FLOAT32)
        OPS.bind("embedding", {"table": put(case.weights["weight"])})(ids)


@EVERY_FORMAT
def test_the_kernels_of_a_format_spill_nothing(format: str) -> None:
    weight = put(make_weight(np.random.default_rng(8), format, (1, FORMATS[format].block_values)))
    with recorded_requests() as kernels:
        for mode in (FLOAT32, BFLOAT16):
            CUPY.table(mode).bind("linear", {"weight": weight})
            CUPY.table(mode).bind("embedding", {"table": weight})
    assert len(kernels) == 8
    for capability in CAPABILITIES[:3]:
        assert all(resources_of(kernel.source, f"sm_{capability}").spilled == 0 for kernel in kernels)
