"""The counter-based random generator Philox4x32-10 in PyTorch, where unsigned words are emulated with int64."""

from __future__ import annotations

import torch

from pocketllm.kernels.sample.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

_WORD = 0xFFFFFFFF


def philox(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four words of counter (c0, c1, c2, c3) under key (k0, k1): int64 with values below 2**32, broadcast.

    A product of two words wraps as int64, but its 64 bits are right: the mask after the shift takes the sign away.
    """
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product1 >> 32 & _WORD) ^ (c1 ^ k0), product1 & _WORD
        c2, c3 = (product0 >> 32 & _WORD) ^ (c3 ^ k1), product0 & _WORD
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of words as `philox` gives them."""
    noise = (words.to(torch.float64) + 0.5).mul_(2.0**-32)
    return noise.log_().neg_().log_().neg_()
