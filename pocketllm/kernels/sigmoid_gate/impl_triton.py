"""The sigmoid gate in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, sigmoid, widen


@triton.jit
def _sigmoid_gate(x, gate, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    share = sigmoid(widen(tl.load(gate + row + column, mask=inside, other=0.0)))
    value = widen(tl.load(x + row + column, mask=inside, other=0.0))
    tl.store(x + row + column, narrow(value * share, x.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
        n = x.shape[-1]
        block = block_of(n, 1024)
        _sigmoid_gate[x.numel() // n, triton.cdiv(n, block)](x, gate, n, BLOCK=block)

    return sigmoid_gate
