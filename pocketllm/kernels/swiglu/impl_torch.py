"""SwiGLU in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mul(functional.silu(gate), up, out=out)

    return swiglu
