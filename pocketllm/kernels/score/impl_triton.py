"""Scores of logits in Triton; the order of the largest is PyTorch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, widen
from pocketllm.kernels.order_torch import largest


@triton.jit
def _score(logits, targets, logsumexp, target_logit, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * n
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        top = tl.maximum(top, widen(tl.load(at + start + lane, mask=start + lane < n, other=float("-inf"))))
    largest_logit = tl.max(top, axis=0)
    shift = tl.where(tl.abs(largest_logit) == float("inf"), 0.0, largest_logit)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        mass += tl.exp(widen(tl.load(at + start + lane, mask=start + lane < n, other=float("-inf"))) - shift)
    total = tl.sum(mass, axis=0)
    # The logarithm of nothing is -inf too, but it is left to no library to say so.
    tl.store(logsumexp + row, tl.where(total > 0, tl.log(tl.where(total > 0, total, 1.0)) + shift, float("-inf")))
    target = tl.load(targets + row)
    value = widen(tl.load(at + target, mask=target >= 0, other=0.0))
    tl.store(target_logit + row, tl.where(target >= 0, value, float("nan")))


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes how many of the largest logits are returned."""
    k: int = call.scalars.k

    def score(
        logits: torch.Tensor,
        targets: torch.Tensor,
        logsumexp: torch.Tensor | None = None,
        target_logit: torch.Tensor | None = None,
        top_ids: torch.Tensor | None = None,
        top_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        rows, n = logits.shape
        logsumexp, target_logit = (
            torch.empty(rows, dtype=torch.float32, device=logits.device) if buffer is None else buffer
            for buffer in (logsumexp, target_logit)
        )
        _score[(rows,)](logits, targets, logsumexp, target_logit, n, BLOCK=block_of(n, 2048))
        values, ids = largest(logits.to(torch.float32), k)
        ids = ids.masked_fill(values == -torch.inf, -1).to(torch.int32)
        top_ids, top_logits = (
            value if buffer is None else buffer.copy_(value) for value, buffer in ((ids, top_ids), (values, top_logits))
        )
        return logsumexp, target_logit, top_ids, top_logits

    return score
