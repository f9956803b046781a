"""Rotary angles in Triton: one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall


@triton.jit
def _rotary_angles(
    positions, lengths, frequencies, numbers, out, DYNAMIC: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    frequency = tl.load(frequencies + pair, mask=inside, other=0.0)
    if DYNAMIC:
        factor, original = tl.load(numbers + 1), tl.load(numbers + 2)
        length = tl.maximum(tl.load(lengths + token).to(tl.float64), original)
        growth = factor * length / original - (factor - 1.0)
        exponent = -2.0 * pair.to(tl.float64) / max(2 * PAIRS - 2, 1)
        frequency = (frequency.to(tl.float64) * tl.exp(exponent * tl.log(growth))).to(tl.float32)
    # Rounded to float32 by definition. Beyond it float64: the fast float32 functions reduce large angles badly.
    angle = (tl.load(positions + token).to(tl.float32) * frequency).to(tl.float64)
    attention_factor = tl.load(numbers)
    at = out + token.to(tl.int64) * 2 * PAIRS + pair
    tl.store(at, (tl.cos(angle) * attention_factor).to(tl.float32), mask=inside)
    tl.store(at + PAIRS, (tl.sin(angle) * attention_factor).to(tl.float32), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the frequencies, and the numbers of the scaling in float64, which a kernel's own arguments cannot be."""
    s = call.scalars
    device = call.device
    frequencies = torch.tensor(s.inverse_frequencies, dtype=torch.float32, device=device)
    if "divisors" in call.weights:
        frequencies = frequencies / call.weights["divisors"].to(torch.float32)
    numbers = torch.tensor(
        [s.attention_factor, s.dynamic_factor, s.original_length], dtype=torch.float64, device=device
    )
    dynamic = s.dynamic_factor != 0
    pairs = frequencies.shape[0]
    block = triton.next_power_of_2(pairs)

    def rotary_angles(
        positions: torch.Tensor, lengths: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if dynamic and lengths is None:
            raise TypeError("rotary_angles: dynamic scaling needs lengths")
        tokens = positions.shape[0]
        out = torch.empty(tokens, 2, pairs, dtype=torch.float32, device=device) if out is None else out
        _rotary_angles[(tokens,)](
            positions,
            lengths if dynamic else None,
            frequencies,
            numbers,
            out,
            DYNAMIC=dynamic,
            PAIRS=pairs,
            BLOCK=block,
        )
        return out

    return rotary_angles
