"""The causal convolution in PyTorch: all rows at once, one tap after another."""

from __future__ import annotations

import torch
from torch.nn import functional

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Sums in float32 whatever the activation dtype, one rounding at the end."""
    weight = call.weights["weight"].to(torch.float32)
    bias = call.weights.get("bias")
    start_of_sum = 0.0 if bias is None else bias.to(torch.float32)

    def causal_conv1d(
        x: torch.Tensor,
        state: torch.Tensor,
        query_start: torch.Tensor,
        state_slot: torch.Tensor,
        save_slot: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        past = state.shape[2]
        before = previous_states(state, state_slot).transpose(1, 2)
        inputs = torch.cat([before.reshape(-1, x.shape[1]), x.to(torch.float32)])
        at = _windows(query_start, before.shape[:2], x)
        total = torch.zeros_like(x, dtype=torch.float32) + start_of_sum
        for tap in range(past + 1):
            total += inputs[at[:, tap]] * weight[:, tap]
        saved = (save_slot >= 0).nonzero()[:, 0]
        state[save_slot[saved]] = inputs[at[saved, 1:]].transpose(1, 2)
        y = functional.silu(total).to(x.dtype)
        return y if out is None else out.copy_(y)

    return causal_conv1d


def previous_states(state: torch.Tensor, state_slot: torch.Tensor) -> torch.Tensor:
    """A copy of the state of each sequence, [S, ...]; zeros where it begins."""
    begins = (state_slot < 0).view(-1, *[1] * (state.dim() - 1))
    return state[state_slot.clamp_min(0)].masked_fill_(begins, 0.0)


def _windows(query_start: torch.Tensor, before: torch.Size, x: torch.Tensor) -> torch.Tensor:
    """Where the inputs of each row lie, oldest first, [T, past + 1]: `past` of each sequence, then the batch's rows."""
    sequences, past = before
    rows = torch.arange(len(x), device=x.device)[:, None]
    lengths = query_start.diff().to(torch.int64)
    sequence = torch.repeat_interleave(torch.arange(sequences, device=x.device), lengths, output_size=len(x))[:, None]
    relative = rows - query_start[sequence] + torch.arange(-past, 1, device=x.device)
    own = sequences * past + rows + torch.arange(-past, 1, device=x.device)
    return torch.where(relative >= 0, own, (sequence + 1) * past + relative)
