"""Scores of logits in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.order_torch import largest


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
        wide = logits.to(torch.float32)
        at_target = wide.gather(1, targets.clamp(min=0).to(torch.int64)[:, None])[:, 0]
        values, ids = largest(wide, k)
        results = (
            wide.logsumexp(dim=1),
            at_target.masked_fill(targets < 0, torch.nan),
            ids.masked_fill(values == -torch.inf, -1).to(torch.int32),
            values,
        )
        buffers = (logsumexp, target_logit, top_ids, top_logits)
        return tuple(
            value if buffer is None else buffer.copy_(value) for value, buffer in zip(results, buffers, strict=True)
        )

    return score
