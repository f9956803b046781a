"""The arithmetic that Triton's kernels share, against PyTorch and NumPy; and its sampler on rows of several blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pocketllm.kernels import numerics_triton
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check
from pocketllm.kernels.numerics_triton import narrow, product, widen
from pocketllm.kernels.registry import spec

BACKEND = backend("triton")
UNIT = 2.0**-24
exp_falling, tanh = numerics_triton.exp_falling, numerics_triton.tanh


@triton.jit
def _widen(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, widen(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def _narrow(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, narrow(tl.load(x + at, mask=at < n), out.dtype.element_ty), mask=at < n)


@triton.jit
def _exp_falling(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, exp_falling(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)


@triton.jit
def _tanh(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tanh(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)


@triton.jit
def _product(a, b, out, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = row * N + column
    tl.store(out + at, product(tl.load(a + at), tl.load(b + at), tl.zeros([N, N], dtype=tl.float32)))


def run(kernel: object, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = x.to(BACKEND.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    kernel[(triton.cdiv(len(x), 4096),)](x, out, len(x), BLOCK=4096)  # type: ignore[index]
    return out.cpu()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_every_bfloat16_is_widened_exactly() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_same(run(_widen, every), every.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_half_to_even(dtype: torch.dtype) -> None:
    words = torch.tensor(np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32).view(np.int32))
    # Halves between two bfloat16 numbers, and the numbers next to them, at every exponent.
    halves = torch.arange(2**16, dtype=torch.int32) << 16 | 0x8000
    x = torch.cat([words, halves, halves - 1, halves + 1]).view(torch.float32)
    with np.errstate(over="ignore"):
        assert_same(run(_narrow, x, dtype), x.to(dtype))


def test_the_exponential_is_within_two_units() -> None:
    x = np.concatenate([-np.logspace(-10, 1.939, 20000), np.linspace(-87, 0, 20000)]).astype(np.float32)
    found = run(_exp_falling, torch.tensor(x)).numpy()
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(found / exact - 1)) <= 4 * UNIT
    far = run(_exp_falling, torch.tensor([-88.0, -1e30, -torch.inf, 0.0]))
    assert far.tolist() == [0, 0, 0, 1]


def test_tanh_is_within_a_few_units() -> None:
    x = np.concatenate([np.logspace(-10, 1.5, 20000), np.linspace(-2, 2, 20001)]).astype(np.float32)
    found = run(_tanh, torch.tensor(x)).numpy().astype(np.float64)
    exact = np.tanh(x.astype(np.float64))
    assert np.all(np.abs(found - exact) <= 6 * UNIT * np.abs(exact))
    assert run(_tanh, torch.tensor([-torch.inf, torch.inf])).tolist() == [-1, 1]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)])
def test_products_are_summed_in_float32(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=rng).to(dtype).to(BACKEND.device) for dtype in dtypes)
    out = torch.empty(32, 32, device=a.device)
    _product[(1,)](a, b, out, N=32)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert torch.all((out.double() - exact).abs() <= 32 * UNIT * size)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
def test_draws_from_rows_of_several_blocks(seed: int, mode: Mode) -> None:
    case = spec("sample").make_case(np.random.default_rng(seed), {"R": 6, "V": 5003})
    assert check(spec("sample"), case, BACKEND, mode).near_ties == 0
