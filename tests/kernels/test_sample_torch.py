"""PyTorch's sampler on vocabularies so large that it takes its short cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check
from pocketllm.kernels.order_torch import largest
from pocketllm.kernels.registry import spec
from pocketllm.kernels.sample import impl_torch

SEEDS = pytest.mark.parametrize("seed", range(6))


@SEEDS
@pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
def test_large_vocabularies(seed: int, mode: Mode) -> None:
    case = spec("sample").make_case(np.random.default_rng(seed), {"R": 8, "V": 9001})
    assert check(spec("sample"), case, backend("torch"), mode).near_ties == 0


@SEEDS
def test_rows_in_several_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl_torch, "_CHUNK", 700)
    case = spec("sample").make_case(np.random.default_rng(seed), {"R": 8, "V": 300})
    assert check(spec("sample"), case, backend("torch"), FLOAT32).near_ties == 0


@SEEDS
def test_a_nucleus_that_is_most_of_the_vocabulary(seed: int) -> None:
    case = spec("sample").make_case(np.random.default_rng(seed), {"R": 4, "V": 9001})
    settings = {"temperature": 2.0, "top_k": 0, "top_p": 0.99}
    arrays = {name: np.full_like(case.arrays[name], value) for name, value in settings.items()}
    logits = np.random.default_rng(seed).standard_normal((4, 9001), dtype=np.float32)
    case.arrays.update(arrays, logits=logits)
    assert check(spec("sample"), case, backend("torch"), FLOAT32).near_ties == 0


@SEEDS
@pytest.mark.parametrize("count", [1, 7, 40, 90])
def test_largest_orders_equal_values_by_index(seed: int, count: int) -> None:
    x = np.random.default_rng(seed).integers(0, 6, size=(3, 100)).astype(np.float32)
    values, ids = largest(torch.tensor(x), count)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))
