"""Attention, cache writes and rotation in CUDA C: no rule broken, and a row's bits the same in any batch.

What the checks find is shown on broken kernels at the end.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT16_CACHE, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check, in_storage, run, scalars_of
from pocketllm.kernels.contract import Arrays, Case
from pocketllm.kernels.jit.cuda_emulator.faults import KernelFaultError
from pocketllm.kernels.jit.cuda_emulator.settings import emulated
from pocketllm.kernels.jit.cuda_source import array, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel
from pocketllm.kernels.paged_attention import impl_cupy
from pocketllm.kernels.registry import spec

Array = npt.NDArray[Any]
EMULATOR = backend("cupy", "cpu")
OPS = ("paged_attention", "kv_write", "rotary", "rotary_angles")
MODES = (FLOAT32, BFLOAT16, FLOAT16_CACHE)
SEGMENT = 64


@pytest.fixture
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl_cupy, "SEGMENT", SEGMENT)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_no_rule_is_broken_in_any_order(op: str, mode: Mode, data: st.DataObject, seed: int) -> None:
    contract = spec(op)
    dims = {name: data.draw(st.integers(low, high), label=name) for name, (low, high) in contract.dims.items()}
    with emulated("checked", seed):
        check(contract, contract.make_case(np.random.default_rng(seed), dims), EMULATOR, mode)


@pytest.mark.parametrize("op", OPS)
def test_the_order_of_threads_changes_no_bit(op: str) -> None:
    contract = spec(op)
    dims = {name: most for name, (_, most) in contract.dims.items()}
    case = contract.make_case(np.random.default_rng(0), dims)
    results = []
    for seed in range(3):
        with emulated(seed=seed):
            results.append(run(contract, case, EMULATOR, FLOAT32, EMULATOR.table(FLOAT32), None))
    for result in results[1:]:
        assert all(np.array_equal(result[name], numbers) for name, numbers in results[0].items())


def attention_case(seed: int = 0, mode: Mode = FLOAT32, **dims: int) -> Case:
    """Sequences of one length, all of whose tokens are new unless `dims` say otherwise."""
    contract = spec("paged_attention")
    sizes = {"S": 1, "kv_heads": 2, "group": 3, "D": 20, "block_size": 16, "context": 40, "ragged": 0, **dims}
    case = contract.make_case(np.random.default_rng(seed), {"new": sizes["context"], **sizes})
    return in_storage(contract, case, mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("dim", "group"), [(1, 1), (12, 5), (64, 16), (80, 3), (96, 1), (128, 17), (129, 2), (200, 4), (256, 1)]
)
def test_heads_and_groups_of_any_size(dim: int, group: int, mode: Mode) -> None:
    contract = spec("paged_attention")
    dims = {"S": 2, "kv_heads": 1, "group": group, "D": dim, "block_size": 16, "context": 37, "new": 1, "ragged": 1}
    check(contract, contract.make_case(np.random.default_rng(dim), dims), EMULATOR, mode)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="heads have 257 numbers, and its kernels keep one for each"):
        attend(attention_case(D=257, context=2))


@pytest.mark.parametrize("blocks", [1, 10**6], ids=["in turn", "beside each other"])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("_short_segments")
def test_long_contexts(seed: int, mode: Mode, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl_cupy, "ENOUGH_BLOCKS", blocks)
    contract = spec("paged_attention")
    dims = {"S": 2, "kv_heads": 1, "group": 2, "D": 24, "block_size": 16, "context": 230, "new": 1, "ragged": 1}
    with emulated("checked", seed):
        check(contract, contract.make_case(np.random.default_rng(seed), dims), EMULATOR, mode)


def attend(case: Case, mode: Mode = FLOAT32, **changed: Array) -> Array:
    """The attention of a case with some arrays replaced, as float32."""
    dtypes = {operand.name: mode.dtype_of(operand) for operand in spec("paged_attention").operands}
    weights, arrays = put(case.weights, dtypes), put(case.arrays | changed, dtypes)
    out: Array = EMULATOR.get(EMULATOR.table(mode).bind("paged_attention", weights, **scalars_of(case))(**arrays))
    return out


def put(arrays: Arrays, dtypes: dict[str, str]) -> dict[str, Any]:
    return {name: EMULATOR.put(numbers, dtypes[name]) for name, numbers in arrays.items()}


def pieces(case: Case, cuts: list[int], mode: Mode = FLOAT32) -> Array:
    """The attention of a prompt, a step for each piece."""
    q, ends = case.arrays["q"], [0, *cuts, len(case.arrays["q"])]
    return np.concatenate(
        [
            attend(
                case,
                mode,
                q=q[start:stop],
                query_start=np.array([0, stop - start], np.int32),
                context_len=np.array([stop], np.int32),
            )
            for start, stop in itertools.pairwise(ends)
        ]
    )


LENGTH = 3 * SEGMENT + 9


@pytest.mark.usefixtures("_short_segments")
@settings(max_examples=12, deadline=None)
@given(
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6).map(sorted),
    window=st.sampled_from([0, 1, 33, 100]),
    softcap=st.sampled_from([0.0, 5.0]),
    sinks=st.booleans(),
    mode=st.sampled_from(MODES),
    blocks=st.sampled_from([1, 10**6]),
)
def test_chunks_change_no_bit(
    cuts: list[int], window: int, softcap: float, sinks: bool, mode: Mode, blocks: int
) -> None:
    case = attention_case(mode=mode, context=LENGTH, kv_heads=1)
    scalars = type(case.scalars)(case.scalars.scale, window, softcap)
    weights = {"sinks": np.array([-1.0, 0.0, 2.0], np.float32)} if sinks else {}
    case = Case(scalars, weights, case.arrays)
    together = attend(case, mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impl_cupy, "ENOUGH_BLOCKS", blocks)
        np.testing.assert_array_equal(pieces(case, cuts, mode), together)
        for row in (0, SEGMENT - 1, SEGMENT, LENGTH - 1):  # decoding
            alone = attend(
                case,
                mode,
                q=case.arrays["q"][row : row + 1],
                query_start=np.array([0, 1], np.int32),
                context_len=np.array([row + 1], np.int32),
            )
            np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.usefixtures("_short_segments")
def test_neighbours_and_a_longer_table_change_no_bit(mode: Mode) -> None:
    """Sequences with 2 to 7 new tokens each beside one another, one at a time, and with a wider table."""
    count, context = 4, 150
    case = attention_case(1, mode, S=count, context=context, new=7)
    rows, lengths = np.split(np.arange(7 * count), count), [2, 7, 3, 5]
    kept = [own[7 - length :] for own, length in zip(rows, lengths, strict=True)]
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = case.arrays["block_table"]
    batch = {"q": case.arrays["q"][np.concatenate(kept)], "query_start": start}
    together = attend(case, mode, **batch)
    wide = np.pad(table, ((0, 0), (0, 20)), constant_values=-1)
    np.testing.assert_array_equal(attend(case, mode, **batch, block_table=wide), together)
    for index, own in enumerate(kept):
        alone = attend(
            case,
            mode,
            q=case.arrays["q"][own],
            query_start=np.array([0, len(own)], np.int32),
            context_len=np.array([context], np.int32),
            block_table=table[index : index + 1],
        )
        np.testing.assert_array_equal(alone, together[start[index] : start[index + 1]])


@pytest.mark.parametrize(("blocks", "memory"), [(1, 2**40), (10**6, 0)], ids=["blocks", "memory"])
@pytest.mark.usefixtures("_short_segments")
def test_segments_in_turn_have_the_bits_of_segments_beside_each_other(
    blocks: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = attention_case(3, context=200, new=9)
    beside = attend(case)
    monkeypatch.setattr(impl_cupy, "ENOUGH_BLOCKS", blocks)
    monkeypatch.setattr(impl_cupy, "MOST_PART_BYTES", memory)
    np.testing.assert_array_equal(attend(case), beside)


def later_values_show(case: Case) -> bool:
    """Whether an earlier row of the same tile changes where a later token's key and value are no numbers."""
    before = attend(case)
    token = len(case.arrays["q"]) - 1
    size = case.arrays["key_cache"].shape[1]
    caches = {name: case.arrays[name].copy() for name in ("key_cache", "value_cache")}
    for cache in caches.values():
        cache[case.arrays["block_table"][0, token // size], token % size] = np.nan
    after = attend(case, FLOAT32, **caches)
    assert np.isnan(after[token]).all()
    return not np.array_equal(after[:token], before[:token])


def test_what_comes_later_does_not_show() -> None:
    assert not later_values_show(attention_case(2))


def test_no_rows_are_a_valid_step() -> None:
    case = attention_case(context=5)
    out = attend(case, q=case.arrays["q"][:0], query_start=np.zeros(2, np.int32))
    assert out.shape == (0, 6, 20)


TANH = """
#include "hyperbolic.cuh"
__global__ void kernel(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = hyperbolic_tangent(x[i]);
}
"""


def test_the_hyperbolic_tangent_is_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(TANH, encoding="utf-8")
    kernel = Kernel("cpu", path, "kernel", x=readonly("float32"), out=array("float32"), n=scalar("int32"))
    rng = np.random.default_rng(0)
    drawn = rng.uniform(-1, 1, 100_000), rng.uniform(-12, 12, 100_000), 2.0 ** rng.uniform(-100, 4, 10_000)
    x = np.concatenate([*drawn, [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(np.float32)
    out = np.empty_like(x)
    kernel([-(-x.size // 256)], [256], x, out, x.size)
    exact = np.tanh(x.astype(np.float64))
    assert np.array_equal(np.isnan(out), np.isnan(exact))
    assert (np.abs(out[:-1] - exact[:-1]) <= 4 * np.spacing(np.abs(exact[:-1]).astype(np.float32))).all()
    assert np.array_equal(np.signbit(out[:-1]), np.signbit(x[:-1]))


def test_angles_of_far_positions() -> None:
    positions = np.array([0, 1, 131072, 2**24 + 2, 2**30], np.int32)
    op = EMULATOR.table(FLOAT32).bind("rotary_angles", inverse_frequencies=(1.0, 0.3))
    angle = positions.astype(np.float32)[:, None] * np.array([1.0, 0.3], np.float32)
    wide = angle.astype(np.float64)
    expected = np.stack([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(op(positions), expected)


def broken(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """The attention kernel with some of its text replaced."""
    text = impl_cupy.SOURCE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = folder / "paged_attention.cu"
    path.write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(impl_cupy, "SOURCE", path)


def test_chunks_that_start_at_a_window_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = attention_case(context=90, kv_heads=1)
    case = Case(type(case.scalars)(case.scalars.scale, window=50), {}, case.arrays)
    cuts = list(range(1, 90, 7))
    np.testing.assert_array_equal(pieces(case, cuts), attend(case))
    broken(monkeypatch, tmp_path, "span.oldest / kKeys * kKeys", "span.oldest")
    assert not np.array_equal(pieces(case, cuts), attend(case))


def test_later_values_times_zero_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken(monkeypatch, tmp_path, "if (!kGuarded || shares[i] != 0.0f) ", "")
    assert later_values_show(attention_case(2))


@pytest.mark.parametrize("why", ["the last chunk's values are read", "the keys are read", "the scalings are read"])
@pytest.mark.usefixtures("_short_segments")
def test_a_missing_barrier_is_found(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(impl_cupy, "ENOUGH_BLOCKS", 1)
    text = impl_cupy.SOURCE.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines(keepends=True) if why in line)
    broken(monkeypatch, tmp_path, "".join([line, text.partition(line)[2][:40]]), text.partition(line)[2][:40])
    with emulated("checked"), pytest.raises(KernelFaultError, match="with nothing that orders the two"):
        attend(attention_case(context=2 * SEGMENT, kv_heads=1))
