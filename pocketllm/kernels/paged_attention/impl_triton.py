"""Attention over a paged cache in Triton.

A tile is a few neighbouring queries of one sequence with all query heads of one key head; its rows are pairs of query
and head. Keys are visited in blocks and segments that start at fixed positions, whatever the step holds: a row sees
the same sums in the same order in a prompt, in any chunk of it and in decoding. What a block hides from a row changes
none of its bits, for its scale is 1 and its share 0.

Segments of a sequence are independent programs, so that a single long sequence fills the device; a second kernel
merges them in ascending order. Where the step's longest table fits into one segment, the first kernel finishes the
rows itself, with the bits that the merging of one segment would give.

Source of the running softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; of the tiles:
Dao et al., "FlashAttention", 2022; of the segments: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import narrow, product, tanh, widen
from pocketllm.kernels.paged_attention.spec import PagedAttention

SEGMENT = 1024
"""Keys that are reduced before the first merging; a multiple of every tile's keys."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows (pairs of query and head) and keys of one product of scores."""

    rows: int
    keys: int
    warps: int
    stages: int


# Chosen so that no register spills, whatever the group, for heads of up to 128 numbers (`jit.report_triton` tells).
_TENSOR_CORES = _Tile(rows=64, keys=32, warps=4, stages=2)
_FLOAT32 = _Tile(rows=16, keys=32, warps=8, stages=1)


@triton.jit
def _sequence_of(tile, query_start, sequences, QUERIES: tl.constexpr):
    """The last sequence whose tiles start at `tile` or before; sequence s has its first at start / QUERIES + s."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _merge(top, mass, mixed, other_top, other_mass, other_mixed):
    """Two reductions over keys as one; each is the largest score, the sum of exp(score - it) and that of the values."""
    new_top = tl.maximum(top, other_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    own, others = tl.exp(top - shift), tl.exp(other_top - shift)
    return new_top, mass * own + other_mass * others, mixed * own[:, None] + other_mixed * others[:, None]


@triton.jit
def _finish(top, mass, mixed, sink, HAS_SINKS: tl.constexpr):
    """The mixed values; a sink takes its share of the mass and gives nothing."""
    if HAS_SINKS:
        new_top = tl.maximum(top, sink)
        own = tl.exp(top - new_top)
        mass = mass * own + tl.exp(sink - new_top)
        mixed = mixed * own[:, None]
    return tl.div_rn(mixed, tl.where(mass > 0, mass, 1.0)[:, None])


@triton.jit(do_not_specialize=["sequences", "table_width", "tokens"])
def _attend(
    q,
    key_cache,
    value_cache,
    sinks,
    query_start,
    context_len,
    block_table,
    out,
    tops,
    masses,
    mixes,
    scale,
    tokens,
    sequences,
    table_width,
    heads,
    kv_heads,
    GROUP: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    D: tl.constexpr,
    D_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SEGMENT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP_LANES
    tile, kv_head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = _sequence_of(tile, query_start, sequences, QUERIES)
    start = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - start
    first = (tile - start // QUERIES - sequence) * QUERIES
    if first < queries:
        lane = tl.arange(0, ROWS)
        query = first + lane // GROUP_LANES
        member = lane % GROUP_LANES
        present = (query < queries) & (member < GROUP)
        head = kv_head * GROUP + member
        number = tl.arange(0, D_LANES)
        of_head = (number < D)[None, :]
        row = (start + query).to(tl.int64) * heads + head
        rows = tl.load(q + row[:, None] * D + number[None, :], mask=present[:, None] & of_head, other=0.0)

        past = tl.load(context_len + sequence) - queries
        position = past + query
        newest = past + tl.minimum(first + QUERIES, queries) - 1
        oldest = tl.maximum(past + first - WINDOW + 1, 0) if WINDOW else 0
        begin = tl.maximum(segment * SEGMENT, oldest // KEYS * KEYS)
        end = tl.minimum((segment + 1) * SEGMENT, newest + 1)

        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, D_LANES], dtype=tl.float32)
        for block_start in range(begin, end, KEYS):
            key_position = block_start + tl.arange(0, KEYS)
            # Other entries of the table and other slots may hold anything, and are not even read.
            held = (key_position >= oldest) & (key_position <= newest)
            entry = tl.load(block_table + sequence * table_width + key_position // BLOCK_SIZE, mask=held, other=0)
            slot = entry.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE
            at = ((slot * kv_heads + kv_head) * D)[:, None] + number[None, :]
            key = tl.load(key_cache + at, mask=held[:, None] & of_head, other=0.0)
            scores = product(rows, tl.trans(key), tl.zeros([ROWS, KEYS], dtype=tl.float32)) * scale
            if SOFTCAP != 0.0:
                scores = SOFTCAP * tanh(scores / SOFTCAP)
            behind = position[:, None] - key_position[None, :]
            visible = (behind >= 0) & held[None, :]
            if WINDOW:
                visible &= behind < WINDOW
            scores = tl.where(visible, scores, float("-inf"))

            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            share = tl.exp(scores - shift[:, None])
            scaling = tl.exp(top - shift)
            top = new_top
            mass = mass * scaling + tl.sum(share, axis=1)
            value = tl.load(value_cache + at, mask=held[:, None] & of_head, other=0.0)
            if value.dtype == q.dtype.element_ty:
                mixed = product(narrow(share, value.dtype), value, mixed * scaling[:, None])
            else:
                mixed = product(share, widen(value), mixed * scaling[:, None])

        if WHOLE:
            sink = widen(tl.load(sinks + head, mask=member < GROUP, other=0.0)) if HAS_SINKS else 0.0
            values = narrow(_finish(top, mass, mixed, sink, HAS_SINKS), out.dtype.element_ty)
            tl.store(out + row[:, None] * D + number[None, :], values, mask=present[:, None] & of_head)
        else:
            part = segment.to(tl.int64) * tokens * heads + row
            tl.store(tops + part, top, mask=present)
            tl.store(masses + part, mass, mask=present)
            tl.store(mixes + part[:, None] * D + number[None, :], mixed, mask=present[:, None] & of_head)


@triton.jit(do_not_specialize=["tokens", "segments"])
def _merge_segments(
    tops,
    masses,
    mixes,
    sinks,
    out,
    tokens,
    segments,
    heads,
    D: tl.constexpr,
    D_LANES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_LANES: tl.constexpr,
):
    head = tl.program_id(1) * HEAD_LANES + tl.arange(0, HEAD_LANES)
    number = tl.arange(0, D_LANES)
    of_row = head < heads
    inside = of_row[:, None] & (number < D)[None, :]
    row = tl.program_id(0).to(tl.int64) * heads + head
    top = tl.full([HEAD_LANES], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([HEAD_LANES], dtype=tl.float32)
    mixed = tl.zeros([HEAD_LANES, D_LANES], dtype=tl.float32)
    for segment in range(segments):
        part = tl.cast(segment, tl.int64) * tokens * heads + row
        other_top = tl.load(tops + part, mask=of_row, other=float("-inf"))
        other_mass = tl.load(masses + part, mask=of_row, other=0.0)
        other_mixed = tl.load(mixes + part[:, None] * D + number[None, :], mask=inside, other=0.0)
        top, mass, mixed = _merge(top, mass, mixed, other_top, other_mass, other_mixed)
    sink = widen(tl.load(sinks + head, mask=of_row, other=0.0)) if HAS_SINKS else 0.0
    values = narrow(_finish(top, mass, mixed, sink, HAS_SINKS), out.dtype.element_ty)
    tl.store(out + row[:, None] * D + number[None, :], values, mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the tile by the dtypes. The grid follows from shapes alone, so no step waits for the device."""
    s: PagedAttention = call.scalars
    sinks: torch.Tensor | None = call.weights.get("sinks")
    tile = _TENSOR_CORES if call.dtype == call.cache_dtype == "bfloat16" else _FLOAT32

    def paged_attention(
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query_start: torch.Tensor,
        context_len: torch.Tensor,
        block_table: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if out is None else out
        (tokens, heads, dim), (_, block_size, kv_heads, _) = q.shape, key_cache.shape
        sequences, width = block_table.shape
        lanes = max(triton.next_power_of_2(dim), 16)
        group = heads // kv_heads
        group_lanes = triton.next_power_of_2(group)
        rows = max(tile.rows, group_lanes)
        segments = max(triton.cdiv(width * block_size, SEGMENT), 1)
        parts = _Parts(segments, q) if segments > 1 else None
        _attend[tokens // (rows // group_lanes) + sequences, kv_heads, segments](
            q,
            key_cache,
            value_cache,
            sinks,
            query_start,
            context_len,
            block_table,
            out,
            parts and parts.tops,
            parts and parts.masses,
            parts and parts.mixes,
            s.scale,
            tokens,
            sequences,
            width,
            heads,
            kv_heads,
            GROUP=group,
            GROUP_LANES=group_lanes,
            D=dim,
            D_LANES=lanes,
            BLOCK_SIZE=block_size,
            WINDOW=s.window,
            SOFTCAP=s.softcap,
            HAS_SINKS=sinks is not None,
            SEGMENT=SEGMENT,
            WHOLE=parts is None,
            ROWS=rows,
            KEYS=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if parts is not None:
            parts.merge(sinks, out)
        return out

    return paged_attention


class _Parts:
    """What each segment of the keys leaves of each row: largest score, mass and mixed values, float32."""

    def __init__(self, segments: int, q: torch.Tensor) -> None:
        self.segments = segments
        # Apart, for a view into a common array would not be aligned alike for every number of tokens.
        self.tops, self.masses = (
            torch.empty(segments, *q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2)
        )
        self.mixes = torch.empty(segments, *q.shape, dtype=torch.float32, device=q.device)

    def merge(self, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
        """Writes the attention of every row to `out`."""
        tokens, heads, dim = out.shape
        lanes = min(triton.next_power_of_2(heads), 4)
        _merge_segments[tokens, triton.cdiv(heads, lanes)](
            self.tops,
            self.masses,
            self.mixes,
            sinks,
            out,
            tokens,
            self.segments,
            heads,
            D=dim,
            D_LANES=max(triton.next_power_of_2(dim), 16),
            HAS_SINKS=sinks is not None,
            HEAD_LANES=lanes,
        )
