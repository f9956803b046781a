"""RMSNorm in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import narrow, widen

_LONGEST = 65536
"""Numbers of a row that one program can hold in registers."""


@triton.jit
def _rms_norm(x, weight, residual, out, eps, n, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.arange(0, BLOCK)
    inside = column < n
    wide = widen(tl.load(x + row + column, mask=inside, other=0.0))
    if HAS_RESIDUAL:
        total = narrow(wide + widen(tl.load(residual + row + column, mask=inside, other=0.0)), x.dtype.element_ty)
        tl.store(residual + row + column, total, mask=inside)
        wide = widen(total)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=0) / n + eps))
    y = wide * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row + column, narrow(y, out.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Rows that fit into the registers of one program."""
    n = call.weights["weight"].shape[0]
    return None if n <= _LONGEST else f"rows of {n} numbers are longer than {_LONGEST}"


def bind(call: OpCall) -> BoundOp:
    """Statistics in float32 whatever the activation dtype, one rounding at the end."""
    eps: float = call.scalars.eps
    weight = call.weights["weight"].to(torch.float32) + call.scalars.weight_offset
    n = weight.shape[0]
    block = triton.next_power_of_2(n)
    warps = min(max(block // 512, 1), 16)

    def rms_norm(
        x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty_like(x) if out is None else out
        _rms_norm[(x.numel() // n,)](
            x, weight, residual, out, eps, n, HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=warps
        )
        return out

    return rms_norm
