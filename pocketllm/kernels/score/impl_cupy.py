"""Scores of logits in CUDA C: segments at fixed columns by many blocks, then one block a row."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_SOURCE = Path(__file__).with_suffix(".cu")

_SEGMENT = 2048
"""Columns of a row that one block surveys."""

_THREADS = 128


@cache
def _survey(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"survey<{c_type(dtype)}, {_THREADS}, {_SEGMENT}>",
        logits=readonly(dtype),
        tops=array("float32"),
        sums=array("float32"),
        ids=array("int32"),
        largest=array("float32"),
        n=scalar("int32"),
        k=scalar("int32"),
    )


@cache
def _merge(device: str, dtype: str) -> Kernel:
    return Kernel(
        device,
        _SOURCE,
        f"merge<{c_type(dtype)}, {_THREADS}>",
        logits=readonly(dtype),
        targets=readonly("int32"),
        tops=readonly("float32"),
        sums=readonly("float32"),
        ids=readonly("int32"),
        largest=readonly("float32"),
        logsumexp=array("float32"),
        target_logit=array("float32"),
        top_ids=array("int32"),
        top_logits=array("float32"),
        n=scalar("int32"),
        segments=scalar("int32"),
        k=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Fixes how many of the largest logits are returned."""
    k: int = call.scalars.k
    survey, merge = _survey(call.device, call.dtype).request(), _merge(call.device, call.dtype).request()
    arrays = array_module(call.device)

    def score(
        logits: Array,
        targets: Array,
        logsumexp: Array | None = None,
        target_logit: Array | None = None,
        top_ids: Array | None = None,
        top_logits: Array | None = None,
    ) -> tuple[Array, ...]:
        rows, n = logits.shape
        segments = -(-n // _SEGMENT)
        results = (
            arrays.empty(rows, np.float32) if logsumexp is None else logsumexp,
            arrays.empty(rows, np.float32) if target_logit is None else target_logit,
            arrays.empty((rows, k), np.int32) if top_ids is None else top_ids,
            arrays.empty((rows, k), np.float32) if top_logits is None else top_logits,
        )
        tops, sums = arrays.empty((rows, segments), np.float32), arrays.empty((rows, segments), np.float32)
        ids, largest = arrays.empty((rows, segments, k), np.int32), arrays.empty((rows, segments, k), np.float32)
        survey([rows, segments], [_THREADS], logits, tops, sums, ids, largest, n, k)
        merge([rows], [_THREADS], logits, targets, tops, sums, ids, largest, *results, n, segments, k)
        return results

    return score
