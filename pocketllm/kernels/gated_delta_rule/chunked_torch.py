"""The gated delta rule over a chunk of rows at once, for backends that do not promise equal bits.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, with the decays
of "Gated Delta Networks", 2024. The corrections of a chunk's rows depend on each other linearly, each on those before
it: they solve a triangular system.
"""

from __future__ import annotations

import torch


def advance(
    held: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [C, heads, V] of C rows of one sequence, and the state after them.

    Args:
        held: [heads, K, V], the state before them.
        query, key: [C, heads, K], normalised and scaled.
        value: [C, heads, V].
        log_decay: float64 [C, heads]; in float32 the differences between their sums would be lost.
        beta: [C, heads, 1].
    """
    query, key, value, beta = (array.transpose(0, 1) for array in (query, key, value, beta))
    total = log_decay.cumsum(dim=0).T
    since_start = total.exp().to(held.dtype)[..., None]
    # What is left at row t of what row j adds, for j up to t.
    left = (total[:, :, None] - total[:, None, :]).tril().exp().to(held.dtype).tril()
    system = beta * (key @ key.mT) * left
    known = beta * (value - since_start * (key @ held))
    correction = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    out = since_start * (query @ held) + ((query @ key.mT) * left) @ correction
    after = since_start[:, -1:] * held + (key * left[:, -1, :, None]).mT @ correction
    return out.transpose(0, 1), after
