"""Selection of rows in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of


@triton.jit
def _take_rows(x, rows, out, n, BLOCK: tl.constexpr):
    target = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    source = tl.load(rows + target) * n
    tl.store(out + target.to(tl.int64) * n + column, tl.load(x + source + column, mask=inside), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def take_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        count, n = rows.shape[0], x.shape[1]
        out = x.new_empty(count, n) if out is None else out
        block = block_of(n, 1024)
        _take_rows[count, triton.cdiv(n, block)](x, rows, out, n, BLOCK=block)
        return out

    return take_rows
