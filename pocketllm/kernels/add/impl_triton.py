"""Addition in place in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, widen


@triton.jit
def _add(residual, x, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = widen(tl.load(residual + row + column, mask=inside))
    total += widen(tl.load(x + row + column, mask=inside))
    tl.store(residual + row + column, narrow(total, residual.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def add(residual: torch.Tensor, x: torch.Tensor) -> None:
        rows, n = residual.shape
        block = block_of(n, 1024)
        _add[rows, triton.cdiv(n, block)](residual, x, n, BLOCK=block)

    return add
