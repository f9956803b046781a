"""The elementary functions of the Numba kernels against NumPy's in float64, over their whole range."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from pocketllm.kernels.jit.toolchain_numba import Kernel, array, readonly
from pocketllm.kernels.simd_numba import LANES, exp, load_f32, load_halves, store_f32


def _exponentials(x: Any, by_lanes: Any, one_by_one: Any) -> None:
    for index in range(0, len(x), LANES):
        store_f32(by_lanes, index, exp(load_f32(x, index)))
    for index in range(len(x)):
        one_by_one[index] = exp(x[index])


def _halves(stored: Any, out: Any) -> None:
    for index in range(0, len(out), LANES):
        store_f32(out, index, load_halves(stored, 2 * index))


FLOATS = array(types.float32, 1)
EXPONENTIALS = Kernel(_exponentials, readonly(types.float32, 1), FLOATS, FLOATS)
HALVES = Kernel(_halves, readonly(types.uint8, 1), FLOATS)


def test_exp_is_the_same_in_vectors_and_alone_and_nearly_exact() -> None:
    special = np.array(
        [np.inf, -np.inf, np.nan, 0.0, -0.0, 88.72284, 88.72283, -87.33655, -103.97, -104.1, 1e30, -1e30]
    )
    x = np.concatenate([np.linspace(-105, 90, 300_000), special]).astype(np.float32)
    x = x[: len(x) // LANES * LANES]
    by_lanes, one_by_one = np.empty_like(x), np.empty_like(x)
    EXPONENTIALS(x, by_lanes, one_by_one)
    np.testing.assert_array_equal(by_lanes.view(np.uint32), one_by_one.view(np.uint32))
    exact = np.exp(x.astype(np.float64))
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isinf(by_lanes), np.isinf(rounded))
    np.testing.assert_array_equal(np.isnan(by_lanes), np.isnan(x))
    finite = np.isfinite(rounded)
    assert (np.abs(by_lanes[finite] - exact[finite]) <= 1.5 * np.spacing(rounded[finite])).all()
    assert (by_lanes[x == 0] == 1).all()


def test_every_half_converts_exactly() -> None:
    stored = np.arange(2**16, dtype=np.uint16)
    out = np.empty(len(stored), dtype=np.float32)
    HALVES(stored.view(np.uint8), out)
    np.testing.assert_array_equal(out, stored.view(np.float16).astype(np.float32))
