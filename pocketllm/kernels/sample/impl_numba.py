"""Sampling in Numba, a row at a time; all arithmetic is float64, as the contract has it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.sample.philox_numba import gumbel
from pocketllm.kernels.sample.reference import WEIGHT_ONE
from pocketllm.kernels.sample.spec import SPEC

_REACH = 28.0
"""An id this far below the likeliest has no weight in a nucleus and cannot win: noise spreads over 26.1."""

_ADJUSTMENTS = {"adjust_ids": "int32", "adjust_bias": "float32", "adjust_count": "int32", "adjust_seen": "bool"}


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    names = [operand.name for operand in SPEC.operands_of("input")]
    kernel = KERNEL.request()

    def sample(*arrays: npt.NDArray[Any], out: npt.NDArray[Any] | None = None, **named: Any) -> npt.NDArray[Any]:
        given = dict(zip(names, arrays, strict=False)) | named
        rows = len(given["logits"])
        if given.get("adjust_start") is None:
            given["adjust_start"] = np.zeros(rows + 1, dtype=np.int32)
            given |= {name: np.empty(0, dtype) for name, dtype in _ADJUSTMENTS.items()}
        if given.get("allowed") is None:
            given["allowed"] = np.empty((rows, 0), dtype=np.uint32)
        out = np.empty(rows, dtype=np.int32) if out is None else out
        kernel(*(given[name] for name in names), out)
        return out

    return sample


def _sample(
    logits: Any,
    seed: Any,
    position: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
    repetition_penalty: Any,
    adjust_start: Any,
    adjust_ids: Any,
    adjust_bias: Any,
    adjust_count: Any,
    adjust_seen: Any,
    allowed: Any,
    out: Any,
) -> None:
    for index in prange(len(logits)):
        row = np.int64(index)
        x = logits[row].astype(np.float64)
        if not _is_usable(x):
            out[row] = -1
            continue
        penalties = (frequency_penalty[row], presence_penalty[row], repetition_penalty[row])
        for entry in range(adjust_start[row], adjust_start[row + 1]):
            token = adjust_ids[entry]
            x[token] = _adjusted(x[token], adjust_bias[entry], adjust_count[entry], adjust_seen[entry], penalties)
        _mask(x, allowed, row)
        best = _first_largest(x)
        if x[best] == -np.inf:
            out[row] = -1
        elif temperature[row] == 0:
            out[row] = best
        else:
            top = x[best] / temperature[row]
            out[row] = _draw(x, top, temperature[row], top_k[row], top_p[row], min_p[row], seed[row], position[row])


@device
def _is_usable(x: Any) -> Any:
    """Whether there is neither NaN nor +inf among the logits."""
    usable = True
    for logit in x:
        usable &= logit < np.inf
    return usable


@device
def _adjusted(logit: Any, bias: Any, count: Any, seen: Any, penalties: Any) -> Any:
    frequency, presence, repetition = penalties
    logit += np.float64(bias)
    if seen:
        logit = logit / np.float64(repetition) if logit > 0 else logit * np.float64(repetition)
    logit -= np.float64(frequency) * count
    return logit - np.float64(presence) if count > 0 else logit


@device
def _mask(x: Any, allowed: Any, row: Any) -> None:
    for token in range(len(x) if allowed.shape[1] > 0 else 0):
        if allowed[row, token // 32] >> np.uint32(token % 32) & np.uint32(1) == 0:
            x[token] = -np.inf


@device
def _first_largest(x: Any) -> Any:
    best = 0
    for token in range(1, len(x)):
        if x[token] > x[best]:
            best = token
    return best


@device
def _draw(x: Any, top: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, position: Any) -> Any:
    """The candidate with the largest sum of logit and noise, of equal ones the lowest id."""
    ids, values = _candidates(x, top, np.float64(temperature))
    kept = len(ids)
    if 0 < top_k < kept or top_p < 1:
        order = np.argsort(-values, kind="mergesort")
        ids, values = ids[order], values[order]
        kept = min(kept, top_k) if top_k > 0 else kept
        if top_p < 1:
            kept = _nucleus(values, kept, top, np.float64(top_p))
    floor = math.log(np.float64(min_p)) if min_p > 0 else -np.inf
    winner, highest = -1, -np.inf
    for place in range(kept):
        if values[place] - top >= floor:
            score = values[place] + gumbel(seed, position, ids[place])
            if score > highest or (score == highest and ids[place] < winner):
                winner, highest = ids[place], score
    return winner


@device
def _candidates(x: Any, top: Any, temperature: Any) -> Any:
    """Ids and logits, divided by the temperature, of all that are within reach, by id."""
    count = 0
    for logit in x:
        count += logit / temperature >= top - _REACH
    ids, values = np.empty(count, np.int64), np.empty(count, np.float64)
    place = 0
    for token in range(len(x)):
        value = x[token] / temperature
        if value >= top - _REACH:
            ids[place], values[place] = token, value
            place += 1
    return ids, values


@device
def _nucleus(values: Any, count: Any, top: Any, top_p: Any) -> Any:
    """How many of the first `count` logits, which fall, have less than the share of their mass before them."""
    total = np.int64(0)
    for place in range(count):
        total += np.int64(math.floor(math.exp(values[place] - top) * WEIGHT_ONE))
    share = np.int64(math.ceil(top_p * np.float64(total)))
    before = np.int64(0)
    for place in range(count):
        if before >= share and place > 0:
            return place
        before += np.int64(math.floor(math.exp(values[place] - top) * WEIGHT_ONE))
    return count


_FLOATS, _INTS = readonly(types.float32, 1), readonly(types.int32, 1)
KERNEL = Kernel(
    _sample,
    readonly(types.float32, 2),
    readonly(types.uint64, 1),
    _INTS,
    _FLOATS,
    _INTS,
    _FLOATS,
    _FLOATS,
    _FLOATS,
    _FLOATS,
    _FLOATS,
    _INTS,
    _INTS,
    _FLOATS,
    _INTS,
    readonly(types.boolean, 1),
    readonly(types.uint32, 2),
    array(types.int32, 1),
    parallel=True,
)
