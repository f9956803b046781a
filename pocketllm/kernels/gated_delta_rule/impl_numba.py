"""The gated delta rule in Numba: some columns of a head's state at a time, from a sequence's first row to its last.

A column of the state takes nothing from the others, and its sums run over the keys' numbers in ascending order, so a
row's bits depend on its own sequence alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.gated_delta_rule.spec import GatedDeltaRule
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import (
    LANES,
    broadcast,
    exp,
    fma,
    load_f32,
    mul,
    sigmoid,
    splat_f32,
    store_f32,
    sub,
    sum_lanes,
)

TILE = 4 * LANES
"""Columns of a state that a thread works on; with 128 rows they fit into the first cache."""

ALONE = 1 << 16
"""Numbers of the states, times rows, below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the scalars and ``exp(a_log)``."""
    s: GatedDeltaRule = call.scalars
    with np.errstate(over="ignore"):  # an infinite rate forgets everything at once
        rate = np.exp(call.weights["a_log"].astype(np.float64)).astype(np.float32)
    dt_bias = call.weights["dt_bias"]
    key_heads, eps = int(s.key_heads), float(s.eps)
    kernel = KERNEL.request()

    def gated_delta_rule(
        mixed: npt.NDArray[Any],
        a: npt.NDArray[Any],
        b: npt.NDArray[Any],
        state: npt.NDArray[Any],
        query_start: npt.NDArray[Any],
        state_slot: npt.NDArray[Any],
        save_slot: npt.NDArray[Any],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        out = np.empty((len(mixed), s.value_heads, s.value_dim), dtype=np.float32) if out is None else out
        kernel(mixed, a, b, state, query_start, state_slot, save_slot, rate, dt_bias, key_heads, eps, out)
        return out

    return gated_delta_rule


def _gated_delta_rule(
    mixed: Any,
    a: Any,
    b: Any,
    state: Any,
    query_start: Any,
    state_slot: Any,
    save_slot: Any,
    rate: Any,
    dt_bias: Any,
    key_heads: Any,
    eps: Any,
    out: Any,
) -> None:
    _, heads, key_dim, value_dim = state.shape
    tiles = (value_dim + TILE - 1) // TILE
    inputs = mixed, a, b
    batch = query_start, state_slot, save_slot
    numbers = rate, dt_bias, key_heads, eps
    if len(mixed) * heads * key_dim * value_dim < ALONE:
        for item in range(len(state_slot) * heads * tiles):
            of_head, tile = divmod(item, tiles)
            run_tile(inputs, state, batch, numbers, of_head // heads, of_head % heads, tile * TILE, out)
    else:
        for item in prange(len(state_slot) * heads * tiles):
            of_head, tile = divmod(np.int64(item), tiles)
            run_tile(inputs, state, batch, numbers, of_head // heads, of_head % heads, tile * TILE, out)


@device
def run_tile(inputs: Any, state: Any, batch: Any, numbers: Any, sequence: Any, head: Any, first: Any, out: Any) -> None:
    """The columns from `first` on of one head of one sequence.

    `inputs` are mixed, a and b; `batch` is query_start, state_slot and save_slot; `numbers` are exp(a_log), dt_bias,
    key_heads and eps.
    """
    mixed, a, b = inputs
    query_start, state_slot, save_slot = batch
    rate, dt_bias, key_heads, eps = numbers
    _, heads, key_dim, value_dim = state.shape
    width = min(TILE, value_dim - first)
    # Columns beyond the state's last stay zero.
    held, column = np.zeros((key_dim, TILE), np.float32), np.zeros(TILE, np.float32)
    query, key = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
    slot = state_slot[sequence]
    if slot >= 0:
        for index in range(key_dim):
            for lane in range(width):
                held[index, lane] = state[slot, head, index, first + lane]
    key_head = head // (heads // key_heads)
    values = 2 * key_heads * key_dim + head * value_dim + first
    for row in range(query_start[sequence], query_start[sequence + 1]):
        _unit(mixed, row, key_head * key_dim, eps, 1.0 / np.sqrt(np.float64(key_dim)), query)
        _unit(mixed, row, (key_heads + key_head) * key_dim, eps, 1.0, key)
        for lane in range(width):
            column[lane] = mixed[row, values + lane]
        decay = exp(-(rate[head] * softplus(a[row, head] + dt_bias[head])))
        _advance(held, query, key, decay, sigmoid(b[row, head], np.float32(1.0)), column)
        for lane in range(width):
            out[row, head, first + lane] = column[lane]
        save = save_slot[row]
        if save >= 0:
            for index in range(key_dim):
                for lane in range(width):
                    state[save, head, index, first + lane] = held[index, lane]


@device
def softplus(x: Any) -> Any:
    """``log(1 + exp(x))`` of a float32, accurate where it is next to zero and where it is next to `x`.

    With ``p = exp(-|x|)``, ``log(1 + p)`` is ``2 atanh(r)`` for ``r = p / (2 + p) <= 1/3``, and the series ``r (1 +
    r^2 / 3 + r^4 / 5 + ...)`` has no terms that cancel. What is left out is 2e-9 of it.
    """
    power = exp(-abs(x))
    ratio = power / (np.float32(2.0) + power)
    square = ratio * ratio
    series = np.float32(0.0)
    for odd in range(15, 0, -2):
        series = fma(series, square, np.float32(1.0) / np.float32(odd))
    return max(x, np.float32(0.0)) + np.float32(2.0) * ratio * series


@device
def _unit(mixed: Any, row: Any, first: Any, eps: Any, scale: Any, to: Any) -> None:
    """Puts a query or key, from column `first` of `mixed` on, into `to`: divided by its length, times `scale`."""
    start, whole = row * mixed.shape[1] + first, len(to) // LANES * LANES
    squares = broadcast(np.float32(0.0))
    for index in range(0, whole, LANES):
        vector = load_f32(mixed, start + index)
        squares = fma(vector, vector, squares)
    total = sum_lanes(squares)
    for index in range(whole, len(to)):
        total = fma(mixed[row, first + index], mixed[row, first + index], total)
    factor = np.float32(scale / np.sqrt(np.float64(total) + eps))
    for index in range(len(to)):
        to[index] = mixed[row, first + index] * factor


@device
def _advance(held: Any, query: Any, key: Any, decay: Any, beta: Any, column: Any) -> None:
    """One row of the rule on the columns that are held; `column` has their values and receives their outputs."""
    decays, betas = broadcast(decay), broadcast(beta)
    r0 = r1 = r2 = r3 = broadcast(np.float32(0.0))
    for index in range(len(key)):
        at, k = index * TILE, splat_f32(key, index)
        r0 = fma(mul(load_f32(held, at), decays), k, r0)
        r1 = fma(mul(load_f32(held, at + LANES), decays), k, r1)
        r2 = fma(mul(load_f32(held, at + 2 * LANES), decays), k, r2)
        r3 = fma(mul(load_f32(held, at + 3 * LANES), decays), k, r3)
    d0 = mul(sub(load_f32(column, 0), r0), betas)
    d1 = mul(sub(load_f32(column, LANES), r1), betas)
    d2 = mul(sub(load_f32(column, 2 * LANES), r2), betas)
    d3 = mul(sub(load_f32(column, 3 * LANES), r3), betas)
    r0 = r1 = r2 = r3 = broadcast(np.float32(0.0))
    for index in range(len(key)):
        at, k, q = index * TILE, splat_f32(key, index), splat_f32(query, index)
        h0 = fma(k, d0, mul(load_f32(held, at), decays))
        h1 = fma(k, d1, mul(load_f32(held, at + LANES), decays))
        h2 = fma(k, d2, mul(load_f32(held, at + 2 * LANES), decays))
        h3 = fma(k, d3, mul(load_f32(held, at + 3 * LANES), decays))
        store_f32(held, at, h0)
        store_f32(held, at + LANES, h1)
        store_f32(held, at + 2 * LANES, h2)
        store_f32(held, at + 3 * LANES, h3)
        r0, r1, r2, r3 = fma(h0, q, r0), fma(h1, q, r1), fma(h2, q, r2), fma(h3, q, r3)
    store_f32(column, 0, r0)
    store_f32(column, LANES, r1)
    store_f32(column, 2 * LANES, r2)
    store_f32(column, 3 * LANES, r3)


_ROWS, _INTS, _FLOATS = readonly(types.float32, 2), readonly(types.int32, 1), readonly(types.float32, 1)
KERNEL = Kernel(
    _gated_delta_rule,
    _ROWS,
    _ROWS,
    _ROWS,
    array(types.float32, 4),
    _INTS,
    _INTS,
    _INTS,
    _FLOATS,
    _FLOATS,
    types.int64,
    types.float64,
    array(types.float32, 3),
    parallel=True,
)
