"""The counter-based random generator Philox4x32-10 in Numba, for one token id at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pocketllm.kernels.jit.toolchain_numba import device
from pocketllm.kernels.sample.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

_WORD = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_MULTIPLIER0, _MULTIPLIER1 = (np.uint64(number) for number in MULTIPLIERS)
_STEP0, _STEP1 = (np.uint64(number) for number in KEY_STEPS)


@device
def token_word(seed: Any, position: Any, token: Any) -> Any:
    """The random word, below 2**32, of a token id; see `pocketllm.kernels.sample.philox.token_words`."""
    c0, c1 = np.uint64(token // 4), np.uint64(position)
    c2 = c3 = np.uint64(0)
    k0, k1 = seed & _WORD, seed >> _HIGH
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIER0, c2 * _MULTIPLIER1
        c0, c1 = (product1 >> _HIGH) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = (product0 >> _HIGH) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = k0 + _STEP0 & _WORD, k1 + _STEP1 & _WORD
    place = token % 4
    if place < 2:
        return c0 if place == 0 else c1
    return c2 if place == 2 else c3


@device
def gumbel(seed: Any, position: Any, token: Any) -> Any:
    """The standard Gumbel noise of a token id; see `pocketllm.kernels.sample.philox.gumbel`."""
    return -math.log(-math.log((np.float64(token_word(seed, position, token)) + 0.5) * 2.0**-32))
