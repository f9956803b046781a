"""The gated delta rule in PyTorch: prompts in chunks of rows, decode steps one row after another for all sequences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from pocketllm.kernels.causal_conv1d.impl_torch import previous_states
from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.gated_delta_rule.chunked_torch import advance
from pocketllm.kernels.gated_delta_rule.spec import GatedDeltaRule

CHUNK = 64
"""Rows that are taken at once at most."""

CHUNKED = 16
"""Rows of a sequence from which on chunks are worth solving a system for."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Everything in float32 whatever the activation dtype, one rounding of the outputs at the end."""
    s: GatedDeltaRule = call.scalars
    rate = call.weights["a_log"].to(torch.float64).exp()
    dt_bias = call.weights["dt_bias"].to(torch.float64)

    def gated_delta_rule(
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor,
        query_start: torch.Tensor,
        state_slot: torch.Tensor,
        save_slot: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = mixed.new_empty(len(mixed), s.value_heads, s.value_dim) if out is None else out
        query, key, value = _split(s, mixed)
        log_decay = -rate * functional.softplus(a.to(torch.float64) + dt_bias)
        beta = b.to(torch.float32).sigmoid()[..., None]
        rows = _Rows(query, key, value, log_decay, beta)
        starts, saves = query_start.tolist(), save_slot.tolist()
        long = [sequence for sequence, (start, stop) in enumerate(pairwise(starts)) if stop - start >= CHUNKED]
        short = [sequence for sequence in range(len(starts) - 1) if sequence not in set(long)]
        # Every state is read before one is written.
        states = previous_states(state, state_slot)
        for sequence in long:
            held = states[sequence]
            for start, stop in _chunks(starts[sequence], starts[sequence + 1], saves):
                read, held = advance(held, *(array[start:stop] for array in rows))
                out[start:stop] = read.to(out.dtype)
                if saves[stop - 1] >= 0:
                    state[saves[stop - 1]] = held
        _row_by_row(rows, [range(*starts[i : i + 2]) for i in short], states[short], saves, state, out)
        return out

    return gated_delta_rule


class _Rows(NamedTuple):
    """What the rows of a step bring: `advance` says which arrays these are."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def _chunks(start: int, stop: int, saves: list[int]) -> Iterator[tuple[int, int]]:
    """The rows from `start` to `stop` in chunks of up to `CHUNK`, each row whose state is saved the last of its own."""
    first = start
    for row in range(start, stop):
        if saves[row] >= 0 or row + 1 - first == CHUNK or row + 1 == stop:
            yield first, row + 1
            first = row + 1


def _row_by_row(
    of: _Rows, spans: list[range], states: torch.Tensor, saves: list[int], state: torch.Tensor, out: torch.Tensor
) -> None:
    """The rows `spans` of some sequences, all heads and sequences at once; `states` are overwritten."""
    decay = of.log_decay.exp().to(torch.float32)[..., None, None]
    # The longest first, so that the sequences which have a row left are always the first ones.
    order = sorted(range(len(spans)), key=lambda sequence: -len(spans[sequence]))
    states = states[order]
    for step in range(max(map(len, spans), default=0)):
        rows = [spans[sequence][step] for sequence in order if step < len(spans[sequence])]
        held = states[: len(rows)].mul_(decay[rows])
        correction = (of.value[rows] - _read(held, of.key[rows])) * of.beta[rows]
        held.addcmul_(of.key[rows][..., None], correction[..., None, :])
        out[rows] = _read(held, of.query[rows]).to(out.dtype)
        kept = [place for place, row in enumerate(rows) if saves[row] >= 0]
        if kept:
            state[[saves[rows[place]] for place in kept]] = held[kept]


def _read(held: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What states [S, heads, K, V] hold under queries or keys [S, heads, K]."""
    return torch.einsum("shkv,shk->shv", held, x)


def _split(s: GatedDeltaRule, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised queries and keys, repeated for each value head, and values; float32."""
    width = s.key_heads * s.key_dim
    wide = mixed.to(torch.float32)

    def unit(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(-1, s.key_heads, s.key_dim)
        scaled = heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + s.eps)
        return scaled.repeat_interleave(s.value_heads // s.key_heads, dim=1)

    query, key = unit(wide[:, :width]), unit(wide[:, width : 2 * width])
    return query * s.key_dim**-0.5, key, wide[:, 2 * width :].reshape(-1, s.value_heads, s.value_dim)
