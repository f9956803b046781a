"""Rotary angles in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the frequencies, and the exponents of dynamic scaling, where it is on."""
    s = call.scalars
    plain = torch.tensor(s.inverse_frequencies, dtype=torch.float32, device=call.device)
    if "divisors" in call.weights:
        plain = plain / call.weights["divisors"].to(torch.float32)
    pairs = plain.shape[0]
    exponents = -2.0 * torch.arange(pairs, dtype=torch.float64, device=call.device) / max(2 * pairs - 2, 1)

    def frequencies(lengths: torch.Tensor | None) -> torch.Tensor:
        if not s.dynamic_factor:
            return plain
        if lengths is None:
            raise TypeError("rotary_angles: dynamic scaling needs lengths")
        length = lengths.to(torch.float64).clamp(min=s.original_length)
        growth = s.dynamic_factor * length / s.original_length - (s.dynamic_factor - 1.0)
        stretch = torch.pow(growth[:, None], exponents)
        return plain.to(torch.float64).mul(stretch).to(torch.float32)

    def rotary_angles(
        positions: torch.Tensor, lengths: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        angle = positions.to(torch.float32)[:, None] * frequencies(lengths)
        pair = torch.stack([angle.cos(), angle.sin()], dim=1)
        return torch.mul(pair, s.attention_factor, out=out)

    return rotary_angles
