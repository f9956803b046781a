"""Rotary position embedding in Triton: one program for some heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import block_of, narrow, widen


@triton.jit
def _rotary(
    x,
    angles,
    heads,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    of_pair = pair < PAIRS
    at = angles + token * 2 * PAIRS + pair
    cos = tl.load(at, mask=of_pair, other=0.0)[None, :]
    sin = tl.load(at + PAIRS, mask=of_pair, other=0.0)[None, :]
    inside = (head < heads)[:, None] & of_pair[None, :]
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else PAIRS
    at = x + (token * heads + head[:, None]) * D + pair[None, :] * step
    first = widen(tl.load(at, mask=inside, other=0.0))
    second = widen(tl.load(at + apart, mask=inside, other=0.0))
    tl.store(at, narrow(first * cos - second * sin, x.dtype.element_ty), mask=inside)
    tl.store(at + apart, narrow(second * cos + first * sin, x.dtype.element_ty), mask=inside)


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the pairing. The products are float32, as the angles are, and rounded when they are stored."""
    interleaved: bool = call.scalars.interleaved

    def rotary(x: torch.Tensor, angles: torch.Tensor) -> None:
        tokens, heads, dim = x.shape
        pairs = angles.shape[2]
        block = triton.next_power_of_2(pairs)
        of_program = block_of(heads, max(2048 // block, 1))
        _rotary[tokens, triton.cdiv(heads, of_program)](
            x, angles, heads, D=dim, PAIRS=pairs, INTERLEAVED=interleaved, HEADS=of_program, BLOCK=block
        )

    return rotary
