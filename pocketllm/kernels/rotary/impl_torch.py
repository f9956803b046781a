"""Rotary position embedding in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the pairing. The products are float32, as the angles are, and rounded when they are stored."""
    interleaved: bool = call.scalars.interleaved

    def rotary(x: torch.Tensor, angles: torch.Tensor) -> None:
        pairs = angles.shape[2]
        cos, sin = angles[:, None].unbind(dim=2)
        if interleaved:
            first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        else:
            first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned_first = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned_first)

    return rotary
