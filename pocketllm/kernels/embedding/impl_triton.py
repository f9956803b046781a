"""Token embedding in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, widen


@triton.jit
def _embedding(table, token_ids, out, scale, hidden, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    entry = tl.load(token_ids + token).to(tl.int64) * hidden
    values = widen(tl.load(table + entry + column, mask=inside)) * scale
    tl.store(out + token.to(tl.int64) * hidden + column, narrow(values, out.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every floating-point table is served; Triton runtimes expand the other formats when they load."""
    table = call.weights["table"]
    if not isinstance(table, torch.Tensor) or not table.is_floating_point():
        return "the table is not a floating-point tensor"
    return None


def bind(call: OpCall) -> BoundOp:
    """The table stays in its own dtype; only the rows that are looked up are converted and scaled."""
    table: torch.Tensor = call.weights["table"]
    dtype: torch.dtype = getattr(torch, call.dtype)
    scale: float = call.scalars.scale
    hidden = table.shape[1]
    block = block_of(hidden, 1024)

    def embedding(token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        tokens = token_ids.shape[0]
        out = torch.empty(tokens, hidden, dtype=dtype, device=table.device) if out is None else out
        _embedding[tokens, triton.cdiv(hidden, block)](table, token_ids, out, scale, hidden, BLOCK=block)
        return out

    return embedding
