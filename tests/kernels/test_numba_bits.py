"""The Numba kernels' bits: the same for a row alone and among others, at any thread count, on any processor.

What the checks find is shown on broken kernels at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.checkpoint.quant import FORMATS, QuantTensor, dequantize
from pocketllm.kernels.checking.arrays import FLOAT32, backend
from pocketllm.kernels.checking.comparison import KernelMismatchError, check, scalars_of
from pocketllm.kernels.contract import Arrays, BoundOp
from pocketllm.kernels.interleaved import LAYOUT, PACKINGS, interleaved
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES, row_codes
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable
from pocketllm.kernels.quantized_linear.spec import make_weight, quantized_activations
from pocketllm.kernels.registry import spec

Array = npt.NDArray[Any]
OPS = backend("numba").table(FLOAT32)
THREADS = min(2, numba.config.NUMBA_NUM_THREADS)

# Enough rows and outputs that work is shared between threads, and tails in each direction.
SHAPES = {"quantized_linear": (9, 1029, 512), "linear": (9, 70, 300)}


def linear_weight(op: str, format: str, outputs: int, columns: int) -> Any:
    rng = np.random.default_rng(3)
    if op == "quantized_linear":
        return make_weight(rng, format, (outputs, columns))
    return rng.standard_normal((outputs, columns), dtype=np.float32)


def activations(rows: int, columns: int) -> Array:
    return np.random.default_rng(4).standard_normal((rows, columns), dtype=np.float32)


def rows_stand_alone(op: BoundOp, x: Array) -> bool:
    """Whether each row of a product is the same bits alone, in pieces of three rows and among all others."""
    together = op(x)
    pieces = [op(x[start : start + 3]) for start in range(0, len(x), 3)]
    alone = [op(x[row : row + 1]) for row in range(len(x))]
    return all(np.array_equal(together, np.concatenate(parts)) for parts in (pieces, alone))


@pytest.mark.parametrize(
    ("op", "format"), [("linear", "F32"), *(("quantized_linear", name) for name in FORMATS_WITH_CODES)]
)
def test_rows_of_a_product_stand_alone_at_any_thread_count(op: str, format: str) -> None:
    rows, outputs, columns = SHAPES[op]
    bound = OPS.bind(op, {"weight": linear_weight(op, format, outputs, columns)})
    x = activations(rows, columns)
    results = []
    for threads in (1, THREADS):
        numba.set_num_threads(threads)
        assert rows_stand_alone(bound, x)
        results.append(bound(x))
    np.testing.assert_array_equal(*results)


def in_order(weight: QuantTensor, x: Array, *, order: int = 1, fused: bool = True) -> Array:
    """The product, one group after another; `order` -1 takes them from the last, unfused rounds each product."""
    codes, scales = quantized_activations(x)
    stored = row_codes(weight, 0, weight.shape[0])
    groups = stored.scales.shape[1]
    width = x.shape[1] // groups
    left = codes.astype(np.int64).reshape(len(x), groups, width)
    right = stored.codes.astype(np.int64).reshape(weight.shape[0], groups, width) - stored.offset
    products = minima = np.zeros((len(x), weight.shape[0]), dtype=np.float32)

    def accumulate(factor: Array, number: Array, total: Array) -> Array:
        # 64 bits of a product that has 48: rounded once, but for ties that no case here has.
        exact = factor.astype(np.longdouble) * number
        return ((exact if fused else exact.astype(np.float32)) + total).astype(np.float32)

    for group in range(groups)[::order]:
        scale = scales[:, group * width // 32]
        whole = left[:, group] @ right[:, group].T
        products = accumulate(scale[:, None] * stored.scales[:, group], whole, products)
        if stored.minima is not None:
            of_codes = scale * left[:, group].sum(axis=1).astype(np.float32)
            minima = accumulate(of_codes[:, None], np.broadcast_to(stored.minima[:, group], whole.shape), minima)
    return products + minima


@pytest.mark.parametrize("format", FORMATS_WITH_CODES)
def test_products_are_summed_in_ascending_order_each_by_a_fused_multiply_add(format: str) -> None:
    weight, x = make_weight(np.random.default_rng(5), format, (61, 1024)), activations(5, 1024)
    out = OPS.bind("quantized_linear", {"weight": weight})(x)
    np.testing.assert_array_equal(out, in_order(weight, x))
    # The check tells other orders and roundings from this one.
    assert not np.array_equal(out, in_order(weight, x, order=-1))
    assert not np.array_equal(out, in_order(weight, x, fused=False))


@pytest.mark.parametrize("format", FORMATS_WITH_CODES)
@given(rows=st.integers(1, 20), blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_the_interleaved_layout_holds_every_number_exactly(format: str, rows: int, blocks: int, seed: int) -> None:
    weight = make_weight(np.random.default_rng(seed), format, (rows, blocks * FORMATS[format].block_values))
    packed = interleaved(weight)
    assert (packed.format, packed.shape, packed.layout) == (format, weight.shape, LAYOUT)
    assert interleaved(packed) is packed
    lookup = OPS.bind("embedding", {"table": packed})
    np.testing.assert_array_equal(lookup(np.arange(rows, dtype=np.int32)), dequantize(weight))
    same = OPS.bind("quantized_linear", {"weight": packed})
    x = activations(2, weight.shape[1])
    np.testing.assert_array_equal(same(x), OPS.bind("quantized_linear", {"weight": weight})(x))


@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q2_K"])
def test_other_formats_are_interleaved_as_float32(format: str) -> None:
    data = np.random.default_rng(6).integers(0, 100, size=(5, FORMATS[format].row_bytes(256)), dtype=np.uint8)
    weight = QuantTensor(data, format, (5, 256))
    packed = interleaved(weight)
    assert (packed.format, packed.layout) == ("F32", LAYOUT)
    lookup = OPS.bind("embedding", {"table": packed}, scale=2.0)
    expected = dequantize(weight) * np.float32(2.0)
    np.testing.assert_array_equal(lookup(np.array([4, 0], dtype=np.int32)), expected[[4, 0]])


def test_every_format_with_codes_has_a_packing() -> None:
    assert set(PACKINGS) == set(FORMATS_WITH_CODES)
    assert all(FORMATS[name].block_values % 32 == 0 for name in PACKINGS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_activation_that_is_not_finite_shows(bad: float) -> None:
    x = activations(3, 64)
    x[1, 40] = bad
    out = OPS.bind("quantized_linear", {"weight": make_weight(np.random.default_rng(7), "Q4_1", (9, 64))})(x)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def attention_case(rows: int) -> tuple[dict[str, Any], Arrays]:
    """A prompt longer than two segments of which the last `rows` rows are new, and its scalars."""
    contract = spec("paged_attention")
    dims = {"S": 1, "kv_heads": 2, "group": 2, "D": 20, "block_size": 16, "context": 700, "new": rows, "ragged": 0}
    case = contract.make_case(np.random.default_rng(8), dims)
    return scalars_of(case), case.arrays


@pytest.mark.parametrize("window", [0, 300])
def test_attention_rows_stand_alone_at_any_thread_count(window: int) -> None:
    scalars, arrays = attention_case(700)
    attend = OPS.bind("paged_attention", **scalars | {"window": window})
    results = []
    for threads in (1, THREADS):
        numba.set_num_threads(threads)
        results.append(attend(**arrays))
    np.testing.assert_array_equal(*results)
    for row in (0, 255, 256, 513, 699):
        one = arrays | {
            "q": arrays["q"][row : row + 1],
            "query_start": np.array([0, 1], dtype=np.int32),
            "context_len": np.array([row + 1], dtype=np.int32),
        }
        np.testing.assert_array_equal(attend(**one)[0], results[0][row])


def digests() -> dict[str, str]:
    """Of one product for each way that codes lie, and of an op for each elementary function."""
    outputs = {}
    for format in ("Q4_1", "Q6_K", "Q8_0"):
        weight = linear_weight("quantized_linear", format, 21, 512)
        outputs[format] = OPS.bind("quantized_linear", {"weight": weight})(activations(5, 512) * 3)
    outputs["swiglu"] = OPS.bind("swiglu")(activations(3, 301) * 20, activations(3, 301))
    outputs["norm"] = OPS.bind("rms_norm", {"weight": np.ones(301, np.float32)}, eps=1e-6)(activations(3, 301))
    return {name: hashlib.sha256(out.tobytes()).hexdigest() for name, out in outputs.items()}


@pytest.mark.parametrize(
    ("name", "features"), [("haswell", "+avx2,+fma,+f16c,+avx,+sse4.2,+ssse3"), ("generic", "")], ids=["avx2", "plain"]
)
def test_every_processor_computes_the_same_bits(name: str, features: str) -> None:
    """As on this one with AVX2 alone, and with nothing: no fused multiply-add, no float16, no vectors of 8."""
    code = "import json; from tests.kernels.test_numba_bits import digests; print(json.dumps(digests()))"
    assert run_elsewhere(code, {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}) == digests()


def run_elsewhere(code: str, environment: dict[str, str]) -> dict[str, str]:
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    variables = {**os.environ, "PYTHONPATH": here, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class FaultyOps(QuantizedOpTable):
    """Numba's ops, one of them broken."""

    def __init__(self, op: str, fault: Callable[..., Any]) -> None:
        super().__init__("numba", device="cpu", dtype="float32")
        self.op, self.fault = op, fault

    def bind(self, op: str, weights: Arrays | None = None, **scalars: Any) -> BoundOp:
        sound = super().bind(op, weights, **scalars)
        return self.fault(sound, weights or {}, scalars) if op == self.op else sound


def split_by_batch(sound: BoundOp, weights: Arrays, scalars: dict[str, Any]) -> BoundOp:
    """Several rows: K in two halves. One row: as a whole. Within any tolerance, but of other bits."""
    weight = weights["weight"]
    half = weight.shape[1] // 2
    halves = [
        OPS.bind("linear", {"weight": np.ascontiguousarray(part)}) for part in (weight[:, :half], weight[:, half:])
    ]

    def linear(x: Array) -> Array:
        if len(x) == 1:
            return sound(x)
        return halves[0](np.ascontiguousarray(x[:, :half])) + halves[1](np.ascontiguousarray(x[:, half:]))

    return linear


def test_a_split_of_k_that_depends_on_the_batch_is_found() -> None:
    rows, outputs, columns = SHAPES["linear"]
    broken = FaultyOps("linear", split_by_batch).bind(
        "linear", {"weight": linear_weight("linear", "F32", outputs, columns)}
    )
    assert not rows_stand_alone(broken, activations(rows, columns))


def seen_too_much(sound: BoundOp, weights: Arrays, scalars: dict[str, Any]) -> BoundOp:
    return OPS.bind(
        "paged_attention", weights, **scalars | {"window": scalars["window"] + 1 if scalars["window"] else 0}
    )


def seen_too_little(sound: BoundOp, weights: Arrays, scalars: dict[str, Any]) -> BoundOp:
    return OPS.bind("paged_attention", weights, **scalars | {"window": max(scalars["window"] - 1, 0) or 1})


@pytest.mark.parametrize("fault", [seen_too_much, seen_too_little])
@pytest.mark.parametrize("op", ["paged_attention", "attention_block", "decoder_layer"])
def test_a_mask_off_by_one_is_found(op: str, fault: Callable[..., Any]) -> None:
    contract, table = spec(op), FaultyOps("paged_attention", fault)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        dims = {name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()}
        case = contract.make_case(rng, dims)
        check(contract, case, backend("numba"), FLOAT32)
        try:
            check(contract, case, backend("numba"), FLOAT32, table=table, give_out=False)
        except KernelMismatchError:
            return
    pytest.fail("no case shows it")
