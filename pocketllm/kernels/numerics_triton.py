"""Arithmetic that the Triton kernels share: dtypes, products and functions whose rounding the contracts count on.

On a GPU these are the hardware's own conversions. Triton's interpreter keeps bfloat16 as bare 16-bit words, so its
conversions truncate and its products multiply the words; there the same results come from integer arithmetic and from
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Products and sums round as they are written, in every specialisation of a kernel alike.
triton.knobs.language.default_fp_fusion = False

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def block_of(size: int, most: int) -> int:
    """Lanes of one program along a dimension of that many numbers: a power of two, `most` at most."""
    return min(int(triton.next_power_of_2(size)), most)


@triton.jit
def widen(x):
    """`x` in float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x`, float32, rounded to `dtype`, half to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def product(a, b, total):
    """`total` plus the matrix product of `a` and `b`, accumulated in float32.

    Operands of one 16-bit dtype go to the tensor cores as they are, for their products are exact in float32. All
    others are multiplied in float32 proper, not in TF32, which keeps 10 bits of mantissa.
    """
    if INTERPRETED:
        # NumPy's matrix product rounds a row by its place among the others, which a GPU does not.
        return total + tl.sum(widen(a)[:, :, None] * widen(b)[None, :, :], axis=1)
    if a.dtype != b.dtype:
        a, b = widen(a), widen(b)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def exp_falling(x):
    """``exp(x)`` of float32 numbers ``x <= 0``, within two units in the last place; 0 below -87.

    The hardware has a power of two only; scaling `x` for it at once, as ``tl.exp`` does, multiplies the rounding of
    the scaled argument by ``|x|``. So the whole powers are split off first (Cody and Waite, "Software Manual for the
    Elementary Functions", 1980), with the logarithm of two in a short and an exact part.
    """
    near = tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.floor(near * 1.4426950408889634 + 0.5)
    rest = (near - whole * 0.693145751953125) - whole * 1.4286068203094172e-06
    power = tl.exp2(rest * 1.4426950408889634)
    scale = ((tl.maximum(whole, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, power * scale)


@triton.jit
def tanh(x):
    """The hyperbolic tangent of float32 numbers, within a few units in the last place.

    Near zero ``1 - exp(-2x)`` cancels, so below 0.5 a polynomial stands in: a least-squares fit of ``tanh(x) / x`` in
    powers of x squared on Chebyshev nodes, with a relative error of 3e-10 before rounding.
    """
    size = tl.abs(x)
    decay = exp_falling(-2.0 * size)
    far = tl.div_rn(1.0 - decay, 1.0 + decay)
    square = x * x
    ratio = -0.006615864112973213 * square + 0.021276233717799187
    ratio = ratio * square - 0.05389375239610672
    ratio = ratio * square + 0.13332904875278473
    ratio = ratio * square - 0.33333325386047363
    ratio = ratio * square + 1.0
    return tl.where(size < 0.5, size * ratio, far) * tl.where(x < 0, -1.0, 1.0)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))`` of float32 numbers; exp of a negative number only, so that nothing overflows."""
    decay = exp_falling(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, decay), 1.0 + decay)
