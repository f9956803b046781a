"""The counter-based random generator Philox4x32-10 in NumPy.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_WORD = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


def philox(counter: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Four random words for each counter: uint32 [n, 4] from uint32 [n, 4] and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = (product1 >> _HIGH) ^ c1 ^ np.uint64(k0), product1 & _WORD
        c2, c3 = (product0 >> _HIGH) ^ c3 ^ np.uint64(k1), product0 & _WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def token_words(seed: int, position: int, vocabulary: int) -> npt.NDArray[np.uint32]:
    """The word of every token id: uint32 [vocabulary].

    The key is the seed, low word first; token ids share a counter ``(id // 4, position, 0, 0)`` by fours, id modulo 4
    picks the word.
    """
    counter = np.zeros((-(-vocabulary // 4), 4), dtype=np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = position
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocabulary]


def gumbel(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise ``-log(-log((word + 0.5) / 2**32))``; from -3.14 to 22.88."""
    return np.asarray(-np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32)), dtype=np.float64)
