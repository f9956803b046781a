"""Sampling in PyTorch: each group of rows pays only for what its settings ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.order_torch import largest
from pocketllm.kernels.sample.philox_torch import gumbel, philox
from pocketllm.kernels.sample.reference import WEIGHT_ONE
from pocketllm.kernels.sample.spec import SPEC

Numbers = dict[str, npt.NDArray[Any]]
"""The step's host arrays, or those of some of its rows."""

_CHUNK = 2**22
"""Logits that are widened to float64 at a time (32 MiB)."""

_NOISE_SPREAD = 26.1
"""More than the largest noise less the smallest: an id this far below the likeliest is never drawn."""

_FIRST_CANDIDATES = 256
"""How many candidates a nucleus is looked for in first; usually it lies within."""

_ROW_NUMBERS = ("seed", "position", "temperature", "top_k", "top_p", "min_p")


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    names = [operand.name for operand in SPEC.operands_of("input")][1:]

    def sample(logits: torch.Tensor, *arrays: Any, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        given = dict(zip(names, arrays, strict=False)) | named
        numbers: Numbers = {name: array for name, array in given.items() if array is not None}
        largest_logit, ids = logits.max(dim=1)
        usable = largest_logit.isfinite()  # neither NaN or +inf in the row, nor -inf everywhere
        ids = ids.masked_fill(~usable, -1)
        others = ~_plainly_greedy(numbers)
        if others.any():
            rows = np.flatnonzero(others & usable.cpu().numpy())
            step = max(1, _CHUNK // logits.shape[1])
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                ids[_moved(some, ids)] = _decide(logits, some, numbers)
        return ids.to(torch.int32) if out is None else out.copy_(ids)

    return sample


def _plainly_greedy(numbers: Numbers) -> npt.NDArray[np.bool_]:
    """The rows whose token is that of the largest logit as it stands."""
    plain: npt.NDArray[np.bool_] = numbers["temperature"] == 0
    if "adjust_start" in numbers:
        plain = plain & (np.diff(numbers["adjust_start"]) == 0)
    return plain & ("allowed" not in numbers)


def _moved(array: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """A host array on the device of `like`. It is copied: PyTorch cannot share memory that must not be written."""
    return torch.tensor(array, device=like.device)


def _column(array: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """A float64 number per row, [R, 1]."""
    return _moved(array.astype(np.float64)[:, None], like)


def _decide(logits: torch.Tensor, rows: npt.NDArray[np.intp], numbers: Numbers) -> torch.Tensor:
    """The ids, int64, of these rows, whose logits are usable."""
    x = logits[_moved(rows, logits)].to(torch.float64)
    if "adjust_start" in numbers:
        _adjust(x, rows, numbers)
    if "allowed" in numbers:
        _mask(x, numbers["allowed"][rows])
    top, ids = x.max(dim=1)
    ids = ids.masked_fill(top == -torch.inf, -1)
    drawn = np.flatnonzero((numbers["temperature"][rows] != 0) & (top > -torch.inf).cpu().numpy())
    if len(drawn):
        settings = {name: numbers[name][rows[drawn]] for name in _ROW_NUMBERS}
        places = _moved(drawn, ids)
        ids[places] = _draw(x if len(drawn) == len(rows) else x[places], settings)
    return ids


def _adjust(x: torch.Tensor, rows: npt.NDArray[np.intp], numbers: Numbers) -> None:
    """Logit bias and penalties of the step's `rows`, in place on their logits [len(rows), V]."""
    start = numbers["adjust_start"]
    place = np.full(len(start) - 1, -1)
    place[rows] = np.arange(len(rows))
    owner = np.repeat(np.arange(len(start) - 1), np.diff(start))
    entries = np.flatnonzero(place[owner] >= 0)
    owner = owner[entries]
    bias, count, seen = (numbers[f"adjust_{name}"][entries] for name in ("bias", "count", "seen"))
    where = _moved(place[owner], x), _moved(numbers["adjust_ids"][entries].astype(np.int64), x)
    value = x[where] + _moved(bias.astype(np.float64), x)
    repetition = _moved(np.where(seen, numbers["repetition_penalty"][owner], 1.0).astype(np.float64), x)
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= _moved(numbers["frequency_penalty"][owner].astype(np.float64) * count, x)
    value -= _moved(np.where(count > 0, numbers["presence_penalty"][owner], 0.0).astype(np.float64), x)
    x[where] = value


def _mask(x: torch.Tensor, allowed: npt.NDArray[np.uint32]) -> None:
    """-inf, in place, where the row's bit is not set."""
    words = _moved(allowed.view(np.int32), x)
    bits = words[:, :, None] >> torch.arange(32, device=x.device, dtype=torch.int32) & 1
    x.masked_fill_(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf)


def _draw(x: torch.Tensor, settings: Numbers) -> torch.Tensor:
    """Cuts and draws: ids, int64 [R]; every row has a temperature and an id above -inf."""
    vocabulary = x.shape[1]
    x /= _column(settings["temperature"], x)
    top = x.amax(dim=1, keepdim=True)
    min_p = settings["min_p"].astype(np.float64)
    floor = np.where(min_p > 0, np.log(np.where(min_p > 0, min_p, 1.0)), -np.inf)
    # Few ids can win where min_p is high or the distribution steep; then the others need no noise.
    reach = _column(np.maximum(floor, -_NOISE_SPREAD) - 0.01, x)
    near = (x >= top + reach).sum(dim=1).cpu().numpy()
    limit = np.where((settings["top_k"] > 0) & (settings["top_k"] < vocabulary), settings["top_k"], vocabulary)
    cut = (limit < vocabulary) | (settings["top_p"] < 1)
    settings |= {"floor": floor, "limit": np.where(cut, limit, near)}
    few = cut | (near <= vocabulary // 16)
    ids = torch.empty(len(x), dtype=torch.int64, device=x.device)
    for chosen, draw in ((few, _draw_from_few), (~few, _draw_from_all)):
        if chosen.any():
            places = _moved(np.flatnonzero(chosen), x)
            part = {name: numbers[chosen] for name, numbers in settings.items()}
            whole = bool(chosen.all())
            ids[places] = draw(x if whole else x[places], top if whole else top[places], part)
    return ids


def _draw_from_all(x: torch.Tensor, top: torch.Tensor, settings: Numbers) -> torch.Tensor:
    """No cut but that of min_p: every id gets its noise."""
    vocabulary = x.shape[1]
    blocks = torch.arange(-(-vocabulary // 4), device=x.device)[None]
    words = _words(blocks, settings).flatten(1)[:, :vocabulary]
    below = x - top
    return gumbel(words).add_(x).masked_fill_(below < _column(settings["floor"], x), -torch.inf).argmax(dim=1)


def _draw_from_few(x: torch.Tensor, top: torch.Tensor, settings: Numbers) -> torch.Tensor:
    """Only the first candidates get noise."""
    values, ids, keep = _candidates(x, top, settings)
    words = _words(ids >> 2, settings)
    noise = gumbel(words.gather(2, (ids & 3)[:, :, None])[:, :, 0])
    keep &= values - top >= _column(settings["floor"], x)
    winner = noise.add_(values).masked_fill_(~keep, -torch.inf).argmax(dim=1, keepdim=True)
    return ids.gather(1, winner)[:, 0]


def _words(blocks: torch.Tensor, settings: Numbers) -> torch.Tensor:
    """The random words [R, n, 4] of the token ids from four times each block on; `blocks` is [R, n] or [1, n]."""
    seed = settings["seed"]
    words = settings["position"], seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32)
    position, low, high = (_moved(word.astype(np.int64)[:, None], blocks) for word in words)
    zero = torch.zeros((), dtype=torch.int64, device=blocks.device)
    return torch.stack(philox(blocks, position, zero, zero, low, high), dim=-1)


def _candidates(
    x: torch.Tensor, top: torch.Tensor, settings: Numbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, ids and whether they survive `limit` and top_p, all [R, n], in falling order.

    A nucleus within the whole vocabulary has no known size, so n grows until every row's nucleus lies within.
    """
    vocabulary = x.shape[1]
    limit, top_p = settings["limit"], _column(settings["top_p"], x)
    unlimited = _moved((limit == vocabulary)[:, None], x)
    mass = _weights(x, top).sum(dim=1, keepdim=True) if (limit == vocabulary).any() else None
    count = int(limit[limit < vocabulary].max(initial=0))
    count = count if mass is None else min(max(count, _FIRST_CANDIDATES), vocabulary)
    while True:
        values, ids = largest(x, count)
        inside = (torch.arange(count, device=x.device) < _moved(limit[:, None], x)) & (values > -torch.inf)
        weights = _weights(values, top) * inside
        held = weights.sum(dim=1, keepdim=True)
        total = held if mass is None else torch.where(unlimited, mass, held)
        share = (top_p * total.to(torch.float64)).ceil().to(torch.int64)
        if count == vocabulary or bool((~unlimited | (held >= share)).all()):
            break
        count = min(16 * count, vocabulary)
    before = weights.cumsum(dim=1) - weights
    return values, ids, inside & ((before < share) | (top_p >= 1))


def _weights(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return (x - top).exp_().mul_(WEIGHT_ONE).floor_().to(torch.int64)
