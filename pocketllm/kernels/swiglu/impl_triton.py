"""SwiGLU in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, sigmoid, widen


@triton.jit
def _swiglu(gate, up, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    z = widen(tl.load(gate + row + column, mask=inside, other=0.0))
    factor = widen(tl.load(up + row + column, mask=inside, other=0.0))
    tl.store(out + row + column, narrow(z * sigmoid(z) * factor, out.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(gate) if out is None else out
        rows, n = gate.shape
        block = block_of(n, 1024)
        _swiglu[rows, triton.cdiv(n, block)](gate, up, out, n, BLOCK=block)
        return out

    return swiglu
