"""Attention over a paged cache in CUDA C, in segments of absolute positions that are merged in order.

Where a step has few tiles, a few decoding sequences for example, the segments of their keys run beside each other and a
second kernel merges them; else each block takes its tile's segments in turn. Both give the same bits. Which of them it
is follows from shapes alone, as the grid does, so no step waits for the device.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle
from pocketllm.kernels.paged_attention.spec import PagedAttention

SEGMENT = 512
"""Keys that are reduced before the first merging."""

ENOUGH_BLOCKS = 512
"""That fill a GPU; from so many on segments need not run beside each other."""

MOST_PART_BYTES = 128 << 20
"""Of memory for segments that run beside each other."""

# As in the source.
_ROWS, _KEYS, _SHARE_STRIDE = 16, 32, 20

_THREADS = (128, 256)
"""Of a block: one for each number of a head, so that accumulators stay in registers."""

SOURCE = Path(__file__).with_suffix(".cu")


@cache
def _attend(source: Path, device: str, dtype: str, cache_dtype: str, threads: int, segment: int) -> Kernel:
    return Kernel(
        device,
        source,
        f"attend<{c_type(dtype)}, {c_type(cache_dtype)}, {threads}, {segment}>",
        q=readonly(dtype),
        key_cache=readonly(cache_dtype),
        value_cache=readonly(cache_dtype),
        sinks=readonly("float32", optional=True),
        query_start=readonly("int32"),
        context_len=readonly("int32"),
        block_table=readonly("int32"),
        out=array(dtype),
        parts=array("float32", optional=True),
        sequences=scalar("int32"),
        table_width=scalar("int32"),
        block_size=scalar("int32"),
        heads=scalar("int32"),
        dim=scalar("int32"),
        window=scalar("int32"),
        scale=scalar("float32"),
        softcap=scalar("float32"),
    )


@cache
def _merge(source: Path, device: str, dtype: str, segment: int) -> Kernel:
    return Kernel(
        device,
        source,
        f"merge_segments<{c_type(dtype)}, {segment}>",
        parts=readonly("float32"),
        sinks=readonly("float32", optional=True),
        query_start=readonly("int32"),
        context_len=readonly("int32"),
        out=array(dtype),
        sequences=scalar("int32"),
        segments=scalar("int32"),
        heads=scalar("int32"),
        dim=scalar("int32"),
        window=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Fixes scalars and sinks. What is bound does not tell the size of heads, so there are kernels for two ranges."""
    s: PagedAttention = call.scalars
    sinks, arrays, segment = call.weights.get("sinks"), array_module(call.device), SEGMENT
    attend = {
        threads: _attend(SOURCE, call.device, call.dtype, call.cache_dtype, threads, segment).request()
        for threads in _THREADS
    }
    merge = _merge(SOURCE, call.device, call.dtype, segment).request()

    def paged_attention(
        q: Array,
        key_cache: Array,
        value_cache: Array,
        query_start: Array,
        context_len: Array,
        block_table: Array,
        out: Array | None = None,
    ) -> Array:
        out = arrays.empty_like(q) if out is None else out
        (tokens, heads, dim), (_, block_size, kv_heads, _) = q.shape, key_cache.shape
        if tokens == 0:
            return out
        (sequences, width), threads = block_table.shape, _threads(dim)
        tiles = tokens * (heads // kv_heads) // _ROWS + sequences
        segments = -(-width * block_size // segment)
        part_bytes = 4 * tokens * heads * segments * (dim + 2)
        if tiles * kv_heads >= ENOUGH_BLOCKS or part_bytes > MOST_PART_BYTES:
            segments = 1
        parts = arrays.empty((tokens, heads, segments, dim + 2), dtype="float32") if segments > 1 else None
        step = sinks, query_start, context_len
        numbers = sequences, width, block_size, heads, dim, s.window, s.scale, s.softcap
        grid, shared = [tiles, kv_heads, segments], _shared_bytes(dim)
        attend[threads](
            grid, [threads], q, key_cache, value_cache, *step, block_table, out, parts, *numbers, shared=shared
        )
        if parts is not None:
            grid, block = [tiles, kv_heads, _ROWS], [-(-dim // 32) * 32]
            merge(grid, block, parts, *step, out, sequences, segments, heads, dim, s.window)
        return out

    return paged_attention


def _threads(dim: int) -> int:
    for threads in _THREADS:
        if dim <= threads:
            return threads
    raise UnsupportedFeatureError(
        f"paged_attention on backend cupy: heads have {dim} numbers, and its kernels keep one for each of up to "
        f"{_THREADS[-1]} threads: choose another backend"
    )


def _shared_bytes(dim: int) -> int:
    """What `Scratch` in the source lays out."""
    stride = (dim + 3) // 8 * 8 + 4
    return 4 * (_KEYS * _SHARE_STRIDE + 2 * _ROWS + (_ROWS + _KEYS) * stride)
