"""Scores of logits in Numba, a row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.simd_numba import LANES, add, broadcast, exp, load_f32, sub, sum_lanes

Floats = npt.NDArray[Any]


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes how many of the largest logits are returned."""
    k: int = call.scalars.k
    kernel = KERNEL.request()

    def score(
        logits: Floats,
        targets: npt.NDArray[Any],
        logsumexp: Floats | None = None,
        target_logit: Floats | None = None,
        top_ids: npt.NDArray[Any] | None = None,
        top_logits: Floats | None = None,
    ) -> tuple[npt.NDArray[Any], ...]:
        rows = len(logits)
        results = (
            np.empty(rows, dtype=np.float32) if logsumexp is None else logsumexp,
            np.empty(rows, dtype=np.float32) if target_logit is None else target_logit,
            np.empty((rows, k), dtype=np.int32) if top_ids is None else top_ids,
            np.empty((rows, k), dtype=np.float32) if top_logits is None else top_logits,
        )
        kernel(logits, targets, *results)
        return results

    return score


def _score(logits: Any, targets: Any, logsumexp: Any, target_logit: Any, top_ids: Any, top_logits: Any) -> None:
    for index in prange(len(logits)):
        row = np.int64(index)
        logsumexp[row] = _log_sum_exp(logits, row)
        target_logit[row] = logits[row, targets[row]] if targets[row] >= 0 else np.float32(np.nan)
        _take_largest(logits, row, top_ids, top_logits)


@device
def _log_sum_exp(logits: Any, row: Any) -> Any:
    columns = logits.shape[1]
    top = logits[row, 0]
    for column in range(columns):
        top = max(top, logits[row, column])
    if not math.isfinite(top):
        return top
    start, whole = row * columns, columns // LANES * LANES
    lanes = broadcast(np.float32(0.0))
    for column in range(0, whole, LANES):
        lanes = add(lanes, exp(sub(load_f32(logits, start + column), broadcast(top))))
    total = np.float64(sum_lanes(lanes))
    for column in range(whole, columns):
        total += np.float64(exp(sub(logits[row, column], top)))
    return np.float32(np.float64(top) + math.log(total))


@device
def _take_largest(logits: Any, row: Any, top_ids: Any, top_logits: Any) -> None:
    """Keeps the largest so far in falling order; a later one goes behind those it equals."""
    k = top_ids.shape[1]
    for place in range(k):
        top_ids[row, place] = -1
        top_logits[row, place] = -np.inf
    for column in range(logits.shape[1] if k else 0):
        logit = logits[row, column]
        if not logit > top_logits[row, k - 1]:
            continue
        place = k - 1
        while place > 0 and logit > top_logits[row, place - 1]:
            top_logits[row, place] = top_logits[row, place - 1]
            top_ids[row, place] = top_ids[row, place - 1]
            place -= 1
        top_logits[row, place] = logit
        top_ids[row, place] = column


KERNEL = Kernel(
    _score,
    readonly(types.float32, 2),
    readonly(types.int32, 1),
    array(types.float32, 1),
    array(types.float32, 1),
    array(types.int32, 2),
    array(types.float32, 2),
    parallel=True,
)
