"""Sampling, row by row, as plainly as it can be said, and how close each decision was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import NoScalars
from pocketllm.kernels.sample.philox import gumbel, token_words

Arrays = dict[str, npt.NDArray[Any]]

_ROUNDOFF = 2.0**-53
WEIGHT_ONE = 2.0**40
"""The integer weight of the likeliest candidate; a whole vocabulary's sum stays below 2**63."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one row.

    Attributes:
        token: the id drawn; -1 when there is none.
        choices: every id that an implementation can arrive at whose exponentials and logarithms err by the last digit.
    """

    token: int
    choices: frozenset[int]


def reference(s: NoScalars, **arrays: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """The id drawn for each row, int32 [R]. All arithmetic is float64.

    Each row's logits take, in this order: the logit bias; the penalties (on ids that were seen: positive logits are
    divided by the repetition penalty, others multiplied; then, on ids generated before, less frequency penalty times
    count and less the presence penalty); the mask of allowed ids (-inf elsewhere). Temperature 0 takes the largest, of
    equal ones the lowest id. Else they are divided by the temperature and cut: `top_k` (0 or less is off) keeps the
    first k in falling order, equal ones by id; `top_p` (1 is off) keeps each of these before which less than that share
    of their mass lies; `min_p` (0 is off) keeps those at least that likely relative to the likeliest. Of what is left
    the largest sum of logit and Gumbel noise is drawn.

    The mass of an id is the integer ``floor(exp(x - largest x) * 2**40)``, and the share is compared as
    ``mass before < ceil(top_p * float64(total mass))``, so no order of summation matters. `min_p` is compared as
    ``x - largest x >= log(min_p)``.

    A row whose logits hold NaN or +inf, and one that leaves no id above -inf, gives -1.
    """
    return np.array([decide(row).token for row in rows(arrays)], dtype=np.int32)


def rows(arrays: Arrays) -> list[Arrays]:
    """Each row's own arrays: its logits after bias, penalties and mask as ``x``, and its numbers."""
    result = []
    for index, logits in enumerate(arrays["logits"]):
        row = {name: array[index] for name, array in arrays.items() if len(array.shape) == 1 and name in _ROW_NUMBERS}
        row["x"] = _adjusted(logits.astype(np.float64), index, arrays)
        result.append(row)
    return result


_ROW_NUMBERS = ("seed", "position", "temperature", "top_k", "top_p", "min_p")


def _adjusted(x: npt.NDArray[np.float64], index: int, arrays: Arrays) -> npt.NDArray[np.float64]:
    if np.isnan(x).any() or np.isposinf(x).any():
        return np.full_like(x, -np.inf)
    if arrays.get("adjust_start") is not None:
        frequency, presence, repetition = (
            float(arrays[name][index]) for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
        )
        for entry in range(*arrays["adjust_start"][index : index + 2].tolist()):
            token, count = int(arrays["adjust_ids"][entry]), int(arrays["adjust_count"][entry])
            value = x[token] + float(arrays["adjust_bias"][entry])
            if arrays["adjust_seen"][entry]:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * count
            x[token] = value - presence if count > 0 else value
    if arrays.get("allowed") is not None:
        tokens = np.arange(len(x))
        allowed = arrays["allowed"][index][tokens // 32] >> (tokens % 32).astype(np.uint32) & np.uint32(1)
        x[allowed == 0] = -np.inf
    return x


def decide(row: Arrays) -> Decision:
    """The decision of one of `rows`."""
    x = row["x"]
    if x.max() == -np.inf:
        return Decision(-1, frozenset([-1]))
    if row["temperature"] == 0:
        token = int(np.argmax(x))
        return Decision(token, frozenset([token]))
    x = x / float(row["temperature"])
    noise = gumbel(token_words(int(row["seed"]), int(row["position"]), len(x)))
    score = x + noise
    stay = kept(x, row)
    tight, loose = kept(x, row, slack=-1), kept(x, row, slack=1)
    # Two logarithms of two units each, and the rounding of the sum.
    error = _ROUNDOFF * (8 + 8 * np.abs(noise) + 2 * np.abs(np.where(stay, score, 0.0)))
    best = np.where(tight, score - error, -np.inf).max()
    choices = np.flatnonzero(loose & (score + error >= best))
    return Decision(int(np.argmax(np.where(stay, score, -np.inf))), frozenset(choices.tolist()))


def kept(x: npt.NDArray[np.float64], row: Arrays, slack: int = 0) -> npt.NDArray[np.bool_]:
    """Which ids survive the cuts; `slack` 1 or -1 moves each cut as far as rounding can, to keep more or fewer."""
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    if row["top_k"] > 0:
        order = order[: int(row["top_k"])]
    below = x[order] - x[order[0]]
    keep = np.ones(len(order), dtype=bool)
    if row["top_p"] < 1:
        weights = np.floor(np.exp(below) * WEIGHT_ONE).astype(np.int64)
        share = int(np.ceil(float(row["top_p"]) * float(weights.sum())))
        # Each weight may come out one higher or lower; the first candidate has nothing before it and stays.
        keep = np.cumsum(weights) - weights < max(share + slack * (2 * len(order) + 2), 1)
    if row["min_p"] > 0:
        cut = np.log(float(row["min_p"]))
        keep &= below >= cut + slack * 4 * _ROUNDOFF * cut
    stay = np.zeros(len(x), dtype=bool)
    stay[order[keep]] = True
    return stay
