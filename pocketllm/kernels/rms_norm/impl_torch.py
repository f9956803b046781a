"""RMSNorm in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Statistics in float32 whatever the activation dtype, one rounding at the end."""
    eps = call.scalars.eps
    weight = call.weights["weight"].to(torch.float32) + call.scalars.weight_offset

    def rms_norm(
        x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if residual is not None:
            x = residual.add_(x)
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        y = (wide * scale * weight).to(x.dtype)
        return y if out is None else out.copy_(y)

    return rms_norm
