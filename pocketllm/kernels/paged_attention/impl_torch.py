"""Attention over a paged cache in PyTorch: one sequence after another, over its gathered blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.paged_attention.spec import PagedAttention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(q, key, value)``: q [n, heads, D] over key and value [m, kv_heads, D], the last n of
which are the queries' own. Both ways hold a number for each pair of query and key; the length of a prompt's chunk
bounds that."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes how one sequence attends: PyTorch's fused attention, or explicit arithmetic for caps and sinks.

    `query_start`, `context_len` and `block_table` may be host arrays (NumPy) too, which saves waiting for the device.
    """
    s: PagedAttention = call.scalars
    sinks: torch.Tensor | None = call.weights.get("sinks")
    attend = _explicit(s, sinks) if s.softcap or sinks is not None else _fused(s)

    def paged_attention(
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query_start: Any,
        context_len: Any,
        block_table: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q) if out is None else out
        table = torch.asarray(block_table, device=q.device, copy=True)
        starts, size = query_start.tolist(), key_cache.shape[1]
        for index, context in enumerate(context_len.tolist()):
            start, stop = starts[index], starts[index + 1]
            if start == stop:
                continue
            first = max(0, context - (stop - start) - s.window + 1) if s.window else 0
            blocks = table[index, first // size : -(-context // size)]
            skipped = first // size * size
            key, value = (
                cache[blocks].flatten(0, 1)[first - skipped : context - skipped].to(q.dtype)
                for cache in (key_cache, value_cache)
            )
            out[start:stop] = attend(q[start:stop], key, value)
        return out

    return paged_attention


def _mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys each query sees, bool [queries, keys]; the last keys are the queries' own."""
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (behind >= 0) & (behind < window) if window else behind >= 0


def _fused(s: PagedAttention) -> Attend:
    def attend(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        (queries, heads, dim), (keys, kv_heads, _) = q.shape, key.shape
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        if queries == 1:
            # A group's heads share their keys, so they can stand as rows of one head; the only row sees every key.
            rows = q.view(1, kv_heads, heads // kv_heads, dim)
            return functional.scaled_dot_product_attention(rows, key, value, scale=s.scale).view(1, heads, dim)
        whole = keys == queries and (s.window == 0 or s.window >= keys)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            key,
            value,
            attn_mask=None if whole else _mask(queries, keys, s.window, q.device),
            is_causal=whole,
            scale=s.scale,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1)

    return attend


def _explicit(s: PagedAttention, sinks: torch.Tensor | None) -> Attend:
    def attend(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        (queries, heads, dim), (keys, kv_heads, _) = q.shape, key.shape
        grouped = q.to(torch.float32).view(queries, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("nkgd,mkd->kgnm", grouped, key.to(torch.float32)) * s.scale
        if s.softcap:
            scores = s.softcap * torch.tanh(scores / s.softcap)
        scores.masked_fill_(~_mask(queries, keys, s.window, q.device), -torch.inf)
        if sinks is not None:
            column = sinks.to(torch.float32).view(kv_heads, -1, 1, 1).expand(-1, -1, queries, 1)
            scores = torch.cat([scores, column], dim=-1)
        share = scores.softmax(dim=-1)[..., :keys]
        mixed = torch.einsum("kgnm,mkd->nkgd", share, value.to(torch.float32))
        return mixed.reshape(queries, heads, dim).to(q.dtype)

    return attend
