"""Gated RMSNorm in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import narrow, sigmoid, widen

_LONGEST = 32768
"""Numbers of a row, and of its gate, that one program can hold in registers."""


@triton.jit
def _gated_rms_norm(x, gate, weight, out, eps, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.arange(0, BLOCK)
    inside = column < n
    wide = widen(tl.load(x + row + column, mask=inside, other=0.0))
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=0) / n + eps))
    y = wide * scale * tl.load(weight + column, mask=inside, other=0.0)
    z = widen(tl.load(gate + row + column, mask=inside, other=0.0))
    tl.store(out + row + column, narrow(y * (z * sigmoid(z)), out.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Rows that fit into the registers of one program."""
    n = call.weights["weight"].shape[0]
    return None if n <= _LONGEST else f"rows of {n} numbers are longer than {_LONGEST}"


def bind(call: OpCall) -> BoundOp:
    """Statistics and gate in float32 whatever the activation dtype, one rounding at the end."""
    eps: float = call.scalars.eps
    weight = call.weights["weight"].to(torch.float32)
    n = weight.shape[0]
    block = triton.next_power_of_2(n)
    warps = min(max(block // 512, 1), 16)

    def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(x) if out is None else out
        _gated_rms_norm[(x.numel() // n,)](x, gate, weight, out, eps, n, BLOCK=block, num_warps=warps)
        return out

    return gated_rms_norm
