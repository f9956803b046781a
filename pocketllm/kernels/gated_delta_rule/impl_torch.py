"""The gated delta rule in PyTorch: one row after another, for all heads and all sequences at once."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from pocketllm.kernels.causal_conv1d.impl_torch import previous_states
from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.gated_delta_rule.spec import GatedDeltaRule


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Everything in float32 whatever the activation dtype, one rounding of the outputs at the end."""
    s: GatedDeltaRule = call.scalars
    rate = call.weights["a_log"].to(torch.float32).exp()
    dt_bias = call.weights["dt_bias"].to(torch.float32)

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
        decay = (-rate * functional.softplus(a.to(torch.float32) + dt_bias)).exp()[..., None, None]
        beta = b.to(torch.float32).sigmoid()[..., None]
        starts, saves = query_start.tolist(), save_slot.tolist()
        lengths = [stop - start for start, stop in pairwise(starts)]
        # The longest first, so that the sequences which have a row left are always the first ones.
        order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
        states = previous_states(state, state_slot[order])
        for step in range(max(lengths, default=0)):
            rows = [starts[sequence] + step for sequence in order if step < lengths[sequence]]
            held = states[: len(rows)].mul_(decay[rows])
            correction = (value[rows] - _read(held, key[rows])) * beta[rows]
            held.addcmul_(key[rows][..., None], correction[..., None, :])
            out[rows] = _read(held, query[rows]).to(out.dtype)
            kept = [place for place, row in enumerate(rows) if saves[row] >= 0]
            if kept:
                state[[saves[rows[place]] for place in kept]] = held[kept]
        return out

    return gated_delta_rule


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
