"""Sampling in CUDA C: segments of rows are settled and rated by many blocks, then one block a row decides.

Decisions rest on comparisons and on sums of integers, so the number of threads shows in no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle
from pocketllm.kernels.sample.spec import SPEC

_SOURCE = Path(__file__).with_suffix(".cu")

_SEGMENT = 1024
"""Tokens of a row that one block settles and rates."""

_THREADS = 128
"""Of a block that has one segment, or a row of few."""

_ROW_THREADS = 512
"""Of the block that decides about a long row, which it reads alone. With more they would run out of registers."""

_LONG_ROW = 8192
"""Tokens."""

_WORKSPACE = 64 << 20
"""Bytes of settled logits at a time; more rows take several rounds."""

_SHARES = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS = ("position", "top_k")
"""Numbers of a row, in the order of the source's ``Share`` and ``Integer``."""

_ADJUSTMENTS = ("adjust_start", "adjust_ids", "adjust_bias", "adjust_count", "adjust_seen")


@cache
def _settle(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"settle<{c_type(dtype)}, {_THREADS}, {_SEGMENT}>",
        logits=readonly(dtype),
        shares=readonly("float32"),
        adjust_start=readonly("int32", optional=True),
        adjust_ids=readonly("int32", optional=True),
        adjust_bias=readonly("float32", optional=True),
        adjust_count=readonly("int32", optional=True),
        adjust_seen=readonly("bool", optional=True),
        allowed=readonly("uint32", optional=True),
        x=array("float64"),
        peaks=array("float64"),
        first=scalar("int32"),
        rows=scalar("int32"),
        n=scalar("int32"),
        words=scalar("int32"),
    )


@cache
def _rate(device: str) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"rate<{_THREADS}, {_SEGMENT}>",
        x=readonly("float64"),
        peaks=readonly("float64"),
        seeds=readonly("uint64"),
        integers=readonly("int32"),
        shares=readonly("float32"),
        best_scores=array("float64"),
        best_ids=array("int32"),
        masses=array("int64"),
        first=scalar("int32"),
        rows=scalar("int32"),
        n=scalar("int32"),
    )


@cache
def _draw(device: str, threads: int) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"draw<{threads}>",
        x=readonly("float64"),
        peaks=readonly("float64"),
        best_scores=readonly("float64"),
        best_ids=readonly("int32"),
        masses=readonly("int64"),
        seeds=readonly("uint64"),
        integers=readonly("int32"),
        shares=readonly("float32"),
        out=array("int32"),
        first=scalar("int32"),
        rows=scalar("int32"),
        n=scalar("int32"),
        segments=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    names = [operand.name for operand in SPEC.operands_of("input")][1:]
    arrays = array_module(call.device)
    settle = _settle(call.device, call.dtype).request()
    rate = _rate(call.device).request()
    draws = {threads: _draw(call.device, threads).request() for threads in (_THREADS, _ROW_THREADS)}

    def sample(logits: Array, *numbers: Any, out: Array | None = None, **named: Any) -> Array:
        rows, n = logits.shape
        out = arrays.empty(rows, np.int32) if out is None else out
        segments, at_once = -(-n // _SEGMENT), max(1, _WORKSPACE // (8 * n))
        threads = _THREADS if n < _LONG_ROW else _ROW_THREADS
        moved = _moved(dict(zip(names, numbers, strict=False)) | named, arrays)
        seeds, integers, shares = moved["seed"], moved["integers"], moved["shares"]
        adjustments = [moved[name] for name in _ADJUSTMENTS]
        words = 0 if moved["allowed"] is None else moved["allowed"].shape[1]
        x = arrays.empty((min(rows, at_once), n), np.float64)
        partial = (len(x), segments)
        peaks, best_scores = arrays.empty(partial, np.float64), arrays.empty(partial, np.float64)
        best_ids, masses = arrays.empty(partial, np.int32), arrays.empty(partial, np.int64)
        for first in range(0, rows, at_once):
            grid = [min(at_once, rows - first), segments]
            settle(grid, [_THREADS], logits, shares, *adjustments, moved["allowed"], x, peaks, first, rows, n, words)
            rated = best_scores, best_ids, masses
            rate(grid, [_THREADS], x, peaks, seeds, integers, shares, *rated, first, rows, n)
            draws[threads](
                grid[:1], [threads], x, peaks, *rated, seeds, integers, shares, out, first, rows, n, segments
            )
        return out

    return sample


def _moved(given: Mapping[str, Any], arrays: ModuleType) -> dict[str, Any]:
    """The step's host arrays on the device, the numbers of rows stacked; None in place of what is not given."""
    host = {name: given.get(name) for name in ("seed", "allowed", *_ADJUSTMENTS)}
    host["shares"] = np.stack([given[name] for name in _SHARES])
    host["integers"] = np.stack([given[name] for name in _INTEGERS])
    return {
        name: None if numbers is None else arrays.asarray(np.ascontiguousarray(numbers))
        for name, numbers in host.items()
    }
