"""Gated RMSNorm in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Statistics and gate in float32 whatever the activation dtype, one rounding at the end."""
    eps = call.scalars.eps
    weight = call.weights["weight"].to(torch.float32)

    def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        y = (wide * scale * weight * functional.silu(gate.to(torch.float32))).to(x.dtype)
        return y if out is None else out.copy_(y)

    return gated_rms_norm
