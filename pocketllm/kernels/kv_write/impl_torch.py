"""Key and value cache writes in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


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
        for rows, cache in ((key, key_cache), (value, value_cache)):
            # A view and not flatten(), which would copy a cache that it cannot view, and write into the copy.
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows.to(cache.dtype))

    return kv_write
