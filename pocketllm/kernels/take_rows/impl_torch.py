"""Selection of rows in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def take_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.index_select(x, 0, rows, out=out)

    return take_rows
