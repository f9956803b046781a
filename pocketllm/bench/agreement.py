"""Where a contender's greedy replies part from ours, and how near a tie that was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pocketllm.bench.contenders.base import LogProbabilities

NEAR_TIE = 0.5
"""Natural logarithm of the ratio between the two likeliest tokens: below it, rounding of weights to four bits and of
activations to eight may turn the choice, and neither reply is wrong."""


def margins(log_probabilities: LogProbabilities, prompt_tokens: int) -> list[float]:
    """How far the likeliest token led at each step of a reply.

    Args:
        log_probabilities: [T, vocab], read over prompt and reply.
        prompt_tokens: of the T tokens, how many are the prompt's.
    """
    top_two = np.partition(log_probabilities[prompt_tokens - 1 : -1], -2, axis=1)[:, -2:]
    return [float(margin) for margin in top_two[:, 1] - top_two[:, 0]]


def parting(ours: Sequence[int], theirs: Sequence[int], our_margins: Sequence[float]) -> dict[str, Any]:
    """The first step at which two replies to one prompt differ; both None where they do not."""
    for step, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if own != other:
            return {"step": step, "margin": round(our_margins[step], 4)}
    return {"step": None, "margin": None}


def summary(partings: Sequence[dict[str, Any]]) -> str:
    """In one line: replies that are equal, that part at a near tie, and that differ."""
    apart = [found for found in partings if found["step"] is not None]
    wrong = [found for found in apart if found["margin"] > NEAR_TIE]
    text = f"{len(partings) - len(apart)} equal, {len(apart) - len(wrong)} part at a near tie, {len(wrong)} differ"
    if apart:
        text += f"; earliest at step {min(found['step'] for found in apart)}"
        text += f", largest margin {max(found['margin'] for found in apart):.2f}"
    return text
