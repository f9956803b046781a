"""Key and value cache writes in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, widen


@triton.jit
def _kv_write(key, value, key_cache, value_cache, slots, n, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    source = token.to(tl.int64) * n + column
    target = tl.load(slots + token) * n + column
    dtype: tl.constexpr = key_cache.dtype.element_ty
    tl.store(key_cache + target, narrow(widen(tl.load(key + source, mask=inside)), dtype), mask=inside)
    tl.store(value_cache + target, narrow(widen(tl.load(value + source, mask=inside)), dtype), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""

    def kv_write(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        tokens, heads, dim = key.shape
        block = block_of(heads * dim, 1024)
        _kv_write[tokens, triton.cdiv(heads * dim, block)](
            key, value, key_cache, value_cache, slots, heads * dim, BLOCK=block
        )

    return kv_write
