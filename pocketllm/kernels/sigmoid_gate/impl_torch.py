"""The sigmoid gate in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix. The sigmoid stays float32; only the product is rounded to the activation dtype."""

    def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
        x.mul_(torch.sigmoid(gate.to(torch.float32)))

    return sigmoid_gate
