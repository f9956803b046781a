"""Attention over a paged cache in Numba.

The keys that a row sees are cut at fixed absolute positions. Each segment is reduced by itself, then the segments are
merged in order, so a row's bits depend on its position and its keys and values alone, not on chunks or neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import (
    LANES,
    add,
    broadcast,
    exp,
    fma,
    load_f32,
    mul,
    splat_f32,
    store_f32,
    sub,
    sum_lanes,
)

SEGMENT = 256
"""Positions that are reduced together."""

ALONE = 1 << 17
"""Products below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Caches in float32."""
    return None if call.cache_dtype == "float32" else f"the cache is {call.cache_dtype}, not float32"


def bind(call: OpCall) -> BoundOp:
    """Fixes the scalars and the sinks."""
    s = call.scalars
    sinks = call.weights.get("sinks", np.empty(0, dtype=np.float32))
    scale, window, softcap = np.float32(s.scale), int(s.window), float(s.softcap)
    kernel = KERNEL.request()

    def paged_attention(
        q: npt.NDArray[Any],
        key_cache: npt.NDArray[Any],
        value_cache: npt.NDArray[Any],
        query_start: npt.NDArray[Any],
        context_len: npt.NDArray[Any],
        block_table: npt.NDArray[Any],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        out = np.empty_like(q) if out is None else out
        kernel(q, key_cache, value_cache, query_start, context_len, block_table, sinks, scale, window, softcap, out)
        return out

    return paged_attention


def _paged_attention(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    query_start: Any,
    context_len: Any,
    block_table: Any,
    sinks: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    out: Any,
) -> None:
    rows, heads, dim = q.shape
    sequence = np.empty(rows, np.int64)
    position = np.empty(rows, np.int64)
    products = 0
    for index in range(len(context_len)):
        start, stop = query_start[index], query_start[index + 1]
        for row in range(start, stop):
            sequence[row] = index
            position[row] = context_len[index] - stop + row
            products += (position[row] + 1) * heads * dim
    numbers = (scale, window, softcap)
    if products < ALONE:
        for item in range(rows * heads):
            row, head = divmod(item, heads)
            blocks = block_table[sequence[row]]
            attend_row(q, key_cache, value_cache, blocks, sinks, numbers, row, position[row], head, out)
    else:
        # A prompt's later rows see more keys: one from its beginning and one from its end make even shares.
        for item in prange((rows + 1) // 2 * heads):
            early, head = divmod(np.int64(item), heads)
            for row in range(early, rows - early, max(rows - 1 - 2 * early, 1)):
                blocks = block_table[sequence[row]]
                attend_row(q, key_cache, value_cache, blocks, sinks, numbers, row, position[row], head, out)


@device
def attend_row(
    q: Any,
    key_cache: Any,
    value_cache: Any,
    blocks: Any,
    sinks: Any,
    numbers: Any,
    row: Any,
    position: Any,
    head: Any,
    out: Any,
) -> None:
    """One head of one row at `position`; `numbers` are scale, window and softcap."""
    scale, window, softcap = numbers
    dim = q.shape[2]
    shares = np.empty(SEGMENT, np.float32)
    mixed = np.zeros(dim, np.float32)
    # A sink is a key whose score is given and whose value is zero.
    top = sinks[head] if len(sinks) > 0 else np.float32(-np.inf)
    mass = np.float32(1.0) if len(sinks) > 0 else np.float32(0.0)
    first = max(0, position - window + 1) if window > 0 else 0
    kv_head = head * key_cache.shape[2] // q.shape[1]
    for segment in range(first // SEGMENT, position // SEGMENT + 1):
        start, stop = max(first, segment * SEGMENT), min(position + 1, (segment + 1) * SEGMENT)
        _scores(q, key_cache, blocks, row, head, kv_head, start, stop, scale, softcap, shares)
        segment_top, segment_mass = _exponentials(shares, stop - start)
        new_top = max(top, segment_top)
        of_before, of_segment = exp(sub(top, new_top)), exp(sub(segment_top, new_top))
        mass = fma(segment_mass, of_segment, mul(mass, of_before))
        _mix(value_cache, blocks, kv_head, start, stop, shares, of_before, of_segment, mixed)
        top = new_top
    for index in range(dim):
        out[row, head, index] = mixed[index] / mass


@device
def _scores(
    q: Any,
    key_cache: Any,
    blocks: Any,
    row: Any,
    head: Any,
    kv_head: Any,
    start: Any,
    stop: Any,
    scale: Any,
    softcap: Any,
    scores: Any,
) -> None:
    """Scaled, capped products of one query with the keys at positions `start` up to `stop`."""
    _, block_size, kv_heads, dim = key_cache.shape
    whole = dim // LANES * LANES
    query = (row * q.shape[1] + head) * dim
    position = start
    while position < stop:
        block, offset = position // block_size, position % block_size
        key = ((np.int64(blocks[block]) * block_size + offset) * kv_heads + kv_head) * dim
        for after in range(position, min(stop, (block + 1) * block_size)):
            lanes = broadcast(np.float32(0.0))
            for index in range(0, whole, LANES):
                lanes = fma(load_f32(q, query + index), load_f32(key_cache, key + index), lanes)
            product = sum_lanes(lanes)
            for index in range(whole, dim):
                other = key_cache[blocks[block], offset + after - position, kv_head, index]
                product = fma(q[row, head, index], other, product)
            score = product * scale
            if softcap > 0.0:
                score = np.float32(softcap * math.tanh(np.float64(score) / softcap))
            scores[after - start] = score
            key += kv_heads * dim
        position = (block + 1) * block_size


@device
def _exponentials(scores: Any, count: Any) -> Any:
    """Turns scores into exponentials relative to the largest one; that one and their sum."""
    top = scores[0]
    for index in range(1, count):
        top = max(top, scores[index])
    whole = count // LANES * LANES
    lanes = broadcast(np.float32(0.0))
    for index in range(0, whole, LANES):
        share = exp(sub(load_f32(scores, index), broadcast(top)))
        store_f32(scores, index, share)
        lanes = add(lanes, share)
    mass = sum_lanes(lanes)
    for index in range(whole, count):
        scores[index] = exp(sub(scores[index], top))
        mass += scores[index]
    return top, mass


@device
def _mix(
    value_cache: Any,
    blocks: Any,
    kv_head: Any,
    start: Any,
    stop: Any,
    shares: Any,
    of_before: Any,
    of_segment: Any,
    mixed: Any,
) -> None:
    """``mixed * of_before + of_segment * (the segment's values, each times its share)``, in place."""
    dim = value_cache.shape[3]
    whole = dim // LANES * LANES
    before, of_segment_lanes = broadcast(of_before), broadcast(of_segment)
    index = 0
    while index < whole:
        # Four sums at a time hide each other's latency; a last few are computed more than once and stored the same.
        last = whole - LANES
        at = index, min(index + LANES, last), min(index + 2 * LANES, last), min(index + 3 * LANES, last)
        t0, t1, t2, t3 = _four_columns(value_cache, blocks, kv_head, start, stop, shares, at)
        m0, m1, m2, m3 = load_f32(mixed, at[0]), load_f32(mixed, at[1]), load_f32(mixed, at[2]), load_f32(mixed, at[3])
        store_f32(mixed, at[0], fma(t0, of_segment_lanes, mul(m0, before)))
        store_f32(mixed, at[1], fma(t1, of_segment_lanes, mul(m1, before)))
        store_f32(mixed, at[2], fma(t2, of_segment_lanes, mul(m2, before)))
        store_f32(mixed, at[3], fma(t3, of_segment_lanes, mul(m3, before)))
        index += 4 * LANES
    block_size = value_cache.shape[1]
    for index in range(whole, dim):
        single = np.float32(0.0)
        for position in range(start, stop):
            block, offset = position // block_size, position % block_size
            single = fma(value_cache[blocks[block], offset, kv_head, index], shares[position - start], single)
        mixed[index] = fma(single, of_segment, mul(mixed[index], of_before))


@device
def _four_columns(value_cache: Any, blocks: Any, kv_head: Any, start: Any, stop: Any, shares: Any, at: Any) -> Any:
    """From each place in `at`, eight numbers of the segment's values, times their shares, summed by position."""
    _, block_size, kv_heads, dim = value_cache.shape
    t0 = t1 = t2 = t3 = broadcast(np.float32(0.0))
    position = start
    while position < stop:
        block, offset = position // block_size, position % block_size
        value = ((np.int64(blocks[block]) * block_size + offset) * kv_heads + kv_head) * dim
        for after in range(position, min(stop, (block + 1) * block_size)):
            share = splat_f32(shares, after - start)
            t0 = fma(load_f32(value_cache, value + at[0]), share, t0)
            t1 = fma(load_f32(value_cache, value + at[1]), share, t1)
            t2 = fma(load_f32(value_cache, value + at[2]), share, t2)
            t3 = fma(load_f32(value_cache, value + at[3]), share, t3)
            value += kv_heads * dim
        position = (block + 1) * block_size
    return t0, t1, t2, t3


_CACHE = readonly(types.float32, 4)
_INTS = readonly(types.int32, 1)
KERNEL = Kernel(
    _paged_attention,
    readonly(types.float32, 3),
    _CACHE,
    _CACHE,
    _INTS,
    _INTS,
    readonly(types.int32, 2),
    readonly(types.float32, 1),
    types.float32,
    types.int64,
    types.float64,
    array(types.float32, 3),
    parallel=True,
)
