"""Token embedding in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """The table stays in its own dtype; only the rows that are looked up are converted and scaled."""
    table: torch.Tensor = call.weights["table"]
    dtype: torch.dtype = getattr(torch, call.dtype)
    scale: float = call.scalars.scale

    def embedding(token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = table.index_select(0, token_ids)
        if scale != 1.0:
            rows = rows.to(torch.float32) * scale
        return rows.to(dtype) if out is None else out.copy_(rows)

    return embedding
