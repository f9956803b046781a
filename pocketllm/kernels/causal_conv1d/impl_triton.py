"""The causal convolution in Triton: one program for some channels of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, sigmoid, widen


@triton.jit
def _sequence_of(row, query_start, sequences):
    """The last sequence that starts at `row` or before."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["sequences"])
def _causal_conv1d(
    x,
    state,
    before,
    query_start,
    state_slot,
    save_slot,
    weight,
    bias,
    out,
    sequences,
    channels,
    PAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    sequence = _sequence_of(row, query_start, sequences)
    age = row - tl.load(query_start + sequence)
    slot = tl.load(state_slot + sequence)
    save = tl.load(save_slot + row)
    of_sequence = before + (sequence.to(tl.int64) * channels + channel) * PAST
    saved = state + (save.to(tl.int64) * channels + channel) * PAST
    total = tl.load(bias + channel, mask=inside, other=0.0) if HAS_BIAS else tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(PAST + 1):
        back = PAST - tap
        # Conditions that hold for all channels or none, as numbers of channels: Triton's interpreter has no other way
        # to put a single truth value into a mask.
        new = channel < tl.where(age >= back, channels, 0)
        old = channel < tl.where((age < back) & (slot >= 0), channels, 0)
        value = widen(tl.load(x + (row - back).to(tl.int64) * channels + channel, mask=new, other=0.0))
        value = tl.where(new, value, tl.load(of_sequence + age + tap, mask=old, other=0.0))
        total += value * tl.load(weight + channel * (PAST + 1) + tap, mask=inside, other=0.0)
        if tap > 0:
            tl.store(saved + tap - 1, value, mask=channel < tl.where(save >= 0, channels, 0))
    at = row.to(tl.int64) * channels + channel
    tl.store(out + at, narrow(total * sigmoid(total), out.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Sums in float32 whatever the activation dtype, one rounding at the end."""
    weight: torch.Tensor = call.weights["weight"]
    bias: torch.Tensor | None = call.weights.get("bias")
    channels, taps = weight.shape
    block = block_of(channels, 512)

    def causal_conv1d(
        x: torch.Tensor,
        state: torch.Tensor,
        query_start: torch.Tensor,
        state_slot: torch.Tensor,
        save_slot: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(x) if out is None else out
        # Rows run at the same time, so what they read must not lie where another one saves.
        before = state[state_slot.clamp_min(0)]
        _causal_conv1d[len(x), triton.cdiv(channels, block)](
            x,
            state,
            before,
            query_start,
            state_slot,
            save_slot,
            weight,
            bias,
            out,
            len(state_slot),
            channels,
            PAST=taps - 1,
            HAS_BIAS=bias is not None,
            BLOCK=block,
        )
        return out

    return causal_conv1d
