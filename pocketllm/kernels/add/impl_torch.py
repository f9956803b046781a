"""Addition in place in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def add(residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.add_(x)

    return add
