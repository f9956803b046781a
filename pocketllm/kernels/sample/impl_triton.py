"""Sampling in Triton: one program a row, however the row is cut.

The ids that top-k and top-p keep are those before a point of one order: falling values, equal ones by id. The point is
found by bisection over the values' bit patterns, with sums of integers only, which no order of summation changes. So
nothing is sorted, and a draw costs a few dozen passes over a row that fits into the second-level cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of
from pocketllm.kernels.sample.reference import WEIGHT_ONE as _WEIGHT_ONE
from pocketllm.kernels.sample.spec import SPEC

Numbers = dict[str, npt.NDArray[Any]]
"""The step's host arrays."""

WEIGHT_ONE = tl.constexpr(_WEIGHT_ONE)

NOISE_SPREAD = tl.constexpr(26.1)
"""More than the largest noise less the smallest: an id this far below the likeliest is never drawn."""

LEAST = tl.constexpr(-(2**63 - 2**52))
"""The order of the least finite number; that of minus infinity is one less."""


@triton.jit(do_not_specialize=["entries", "rows"])
def _adjust(x, owner, ids, bias, count, seen, penalties, entries, rows, n, BLOCK: tl.constexpr):
    """Logit bias and penalties of single ids, in place; `penalties` is frequency, presence and repetition, [3, R]."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row = tl.load(owner + entry, mask=inside, other=0)
    at = x + row.to(tl.int64) * n + tl.load(ids + entry, mask=inside, other=0)
    value = tl.load(at, mask=inside, other=0.0) + tl.load(bias + entry, mask=inside, other=0.0).to(tl.float64)
    times = tl.load(count + entry, mask=inside, other=0)
    frequency = tl.load(penalties + row, mask=inside, other=0.0).to(tl.float64)
    presence = tl.load(penalties + rows + row, mask=inside, other=0.0).to(tl.float64)
    repetition = tl.load(penalties + 2 * rows + row, mask=inside, other=1.0).to(tl.float64)
    repeated = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where(tl.load(seen + entry, mask=inside, other=0) != 0, repeated, value)
    value -= frequency * times
    value -= tl.where(times > 0, presence, 0.0)
    tl.store(at, value, mask=inside)


@triton.jit
def _settle(x, allowed, shares, n, words, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Mask and temperature, in place. A number that spoils its row, NaN or +inf, is left as NaN behind any mask."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n
    value = tl.load(x + row * n + token, mask=inside, other=0.0)
    heat = tl.load(shares + row).to(tl.float64)
    usable = value < float("inf")
    value /= tl.where(heat == 0, 1.0, heat)
    if MASKED:
        word = tl.load(allowed + row * words + token // 32, mask=inside, other=0)
        value = tl.where((word >> token % 32) & 1 == 1, value, float("-inf"))
    tl.store(x + row * n + token, tl.where(usable, value, float("nan")), mask=inside)


@triton.jit
def _load(x, start, n, BLOCK: tl.constexpr):
    """Some numbers of a row, -inf beyond its end."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(x + token, mask=token < n, other=float("-inf"))


@triton.jit
def _order(x):
    """Integers in the order of the float64 numbers `x`; zeros of both signs are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _weight(x, top):
    """The integer mass of a number."""
    return tl.floor(tl.exp(x - top) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _weight_of_order(order, top):
    """The integer mass of the number at this place of the order."""
    return _weight((order ^ ((order >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True), top)


@triton.jit
def _survey(x, place, top, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """What lies above a place of the order, counted or weighed; and the nearest numbers' places, up to it and above."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    below = tl.full([BLOCK], LEAST - 1, dtype=tl.int64)
    above = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    for start in range(0, n, BLOCK):
        value = _load(x, start, n, BLOCK)
        order = _order(value)
        is_above = order > place
        total += tl.where(is_above, 1 if COUNT else _weight(value, top), 0)
        below = tl.maximum(below, tl.where(is_above, LEAST - 1, order))
        above = tl.minimum(above, tl.where(is_above, order, 0x7FFFFFFFFFFFFFFF))
    return tl.sum(total, axis=0), tl.max(below, axis=0), tl.min(above, axis=0)


@triton.jit
def _last_kept(x, low, high, share, top, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The last place of the order above which less than `share` lies, and how much does.

    Above `low` lies as much as `share` or more; `high` is the place of the largest number. Both ends move to numbers
    of the row, so the search ends when one is left between them.
    """
    before = tl.zeros([], dtype=tl.int64)
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        total, below, above = _survey(x, middle, top, n, COUNT, BLOCK)
        if total < share:
            high = below
            before = total
        else:
            low = above - 1
    return high, before


@triton.jit
def _cut(x, top, top_k, top_p, n, BLOCK: tl.constexpr):
    """Where top-k and top-p end a row: a place of the order, and how many of the numbers at it are kept, by id."""
    place = tl.full([], LEAST, dtype=tl.int64)
    kept = tl.full([], 1, dtype=tl.int64) * n
    finite, _, _ = _survey(x, LEAST - 1, top, n, True, BLOCK)
    if (top_k > 0) & (top_k < finite):
        everything = tl.full([], LEAST - 1, dtype=tl.int64)
        place, before = _last_kept(x, everything, _order(top), top_k.to(tl.int64), top, n, True, BLOCK)
        kept = top_k - before
    if top_p < 1:
        above, _, _ = _survey(x, place, top, n, False, BLOCK)
        weight = _weight_of_order(place, top)
        total = above + kept * weight
        share = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        if above < share:
            # The nucleus reaches to where top-k ends, and may take fewer of the equal numbers there.
            within = (share - above + weight - 1) // tl.maximum(weight, 1)
            kept = tl.where(weight > 0, tl.minimum(kept, within), kept)
        else:
            place, before = _last_kept(x, place, _order(top), share, top, n, False, BLOCK)
            weight = _weight_of_order(place, top)
            kept = (share - before + weight - 1) // weight
    return place, kept


@triton.jit
def _gumbel(seed, position, token):
    """Standard Gumbel noise of each token id; see `pocketllm.kernels.sample.philox`."""
    first, second, third, fourth = tl.philox(seed, token // 4, position, 0, 0)
    word = tl.where(token % 4 < 2, tl.where(token % 4 == 0, first, second), tl.where(token % 4 == 2, third, fourth))
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit(do_not_specialize=["rows"])
def _draw(x, seed, places, shares, out, rows, n, BLOCK: tl.constexpr):
    """The token of each row; `places` is position and top-k, [2, R], `shares` temperature, top-p and min-p, [3, R]."""
    row = tl.program_id(0)
    x += row.to(tl.int64) * n
    tops = tl.full([BLOCK], float("-inf"), dtype=tl.float64)
    spoilt = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n, BLOCK):
        value = _load(x, start, n, BLOCK)
        spoilt += (value != value).to(tl.int32)
        tops = tl.maximum(tops, value)
    top = tl.max(tops, axis=0)
    winner = tl.full([], -1, dtype=tl.int32)
    if (tl.sum(spoilt, axis=0) == 0) & (top > float("-inf")):
        greedy = tl.load(shares + row) == 0
        place = tl.full([], LEAST, dtype=tl.int64)
        kept = tl.full([], 1, dtype=tl.int64) * n
        top_k, top_p = tl.load(places + rows + row), tl.load(shares + rows + row)
        if ((top_k > 0) | (top_p < 1)) & (greedy == 0):
            place, kept = _cut(x, top, top_k, top_p, n, BLOCK)
        min_p = tl.load(shares + 2 * rows + row).to(tl.float64)
        floor = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
        best = tl.full([BLOCK], float("-inf"), dtype=tl.float64)
        chosen = tl.zeros([BLOCK], dtype=tl.int32)
        equal = tl.zeros([], dtype=tl.int64)
        for start in range(0, n, BLOCK):
            value = _load(x, start, n, BLOCK)
            # Numbers farther down cannot win; those at the place of the cut do not count either if it lies there.
            if tl.max(value, axis=0) >= top - NOISE_SPREAD:
                token = start + tl.arange(0, BLOCK)
                order = _order(value)
                at_place = (order == place).to(tl.int64)
                rank = equal + tl.cumsum(at_place, axis=0) - at_place
                equal += tl.sum(at_place, axis=0)
                stays = (order > place) | ((at_place == 1) & (rank < kept))
                stays &= (value - top >= floor) & (value > float("-inf"))
                noise = tl.where(greedy, 0.0, _gumbel(tl.load(seed + row), tl.load(places + row), token))
                total = tl.where(stays, value + noise, float("-inf"))
                chosen = tl.where(total > best, token, chosen)
                best = tl.maximum(best, total)
        winner = tl.min(tl.where(best == tl.max(best, axis=0), chosen, n), axis=0)
    tl.store(out + row, winner)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    names = [operand.name for operand in SPEC.operands_of("input")][1:]

    def sample(logits: torch.Tensor, *arrays: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        given = dict(zip(names, arrays, strict=False)) | named
        numbers: Numbers = {name: array for name, array in given.items() if array is not None}
        rows, n = logits.shape
        device = logits.device
        out = torch.empty(rows, dtype=torch.int32, device=device) if out is None else out
        x = logits.to(torch.float64)
        if "adjust_start" in numbers and len(numbers["adjust_ids"]):
            _adjust_all(x, numbers)
        shares = _stacked(numbers, "temperature", "top_p", "min_p", like=x)
        block = block_of(n, 1024)
        words = _moved(numbers["allowed"].view(np.int32), x) if "allowed" in numbers else None
        width = 0 if words is None else words.shape[1]
        _settle[rows, triton.cdiv(n, block)](x, words, shares, n, width, MASKED=words is not None, BLOCK=block)
        seed = _moved(numbers["seed"].view(np.int64), x)
        _draw[(rows,)](x, seed, _stacked(numbers, "position", "top_k", like=x), shares, out, rows, n, BLOCK=block)
        return out

    return sample


def _moved(array: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """A host array on the device of `like`. It is copied: PyTorch cannot share memory that must not be written."""
    return torch.tensor(array, device=like.device)


def _stacked(numbers: Numbers, *names: str, like: torch.Tensor) -> torch.Tensor:
    """A number per row of each name, [names, R], in one copy."""
    return _moved(np.stack([numbers[name] for name in names]), like)


def _adjust_all(x: torch.Tensor, numbers: Numbers) -> None:
    """Logit bias and penalties of the step, in place on its logits [R, V], float64."""
    rows, n = x.shape
    start = numbers["adjust_start"]
    owner = np.repeat(np.arange(rows, dtype=np.int32), np.diff(start))
    penalties = _stacked(numbers, "frequency_penalty", "presence_penalty", "repetition_penalty", like=x)
    entries = len(owner)
    _adjust[(triton.cdiv(entries, 128),)](
        x,
        _moved(owner, x),
        _moved(numbers["adjust_ids"], x),
        _moved(numbers["adjust_bias"], x),
        _moved(numbers["adjust_count"], x),
        _moved(numbers["adjust_seen"].view(np.uint8), x),
        penalties,
        entries,
        rows,
        n,
        BLOCK=128,
    )
