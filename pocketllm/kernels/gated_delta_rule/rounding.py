"""How far a float32 computation of the gated delta rule may be off: each operation with a bound of its error.

The standard model of rounding (Higham, "Accuracy and Stability of Numerical Algorithms", 2002): what an operation
makes of operands that are off, and one rounding of its result. A number that float32 cannot hold as a normal one may be
flushed to zero, which adds the smallest normal number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF
from pocketllm.kernels.sigmoid_gate.spec import sigmoid

Wide = npt.NDArray[np.float64]

_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Computed:
    """Numbers as float64 has them, and how far they may be off in float32; both arrays of one shape."""

    value: Wide
    error: Wide

    @property
    def size(self) -> Wide:
        """The most that the numbers' absolute values can be."""
        return np.abs(self.value) + self.error

    def __getitem__(self, key: Any) -> Computed:
        return Computed(self.value[key], self.error[key])

    def __add__(self, other: Computed) -> Computed:
        return rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Computed) -> Computed:
        return rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Computed) -> Computed:
        value = self.value * other.value
        return rounded(value, self.size * other.size - np.abs(value))

    def contract(self, other: Computed) -> Computed:
        """``sum over k of self[h, k, v] * other[h, k]``, in any order: a rounding for each product and each sum."""

        def product(a: Wide, b: Wide) -> Wide:
            total: Wide = np.einsum("hkv,hk->hv", a, b)
            return total

        size = product(self.size, other.size)
        off = size - product(np.abs(self.value), np.abs(other.value))
        terms = self.value.shape[1]
        roundings = (terms + 1) * (ACCUMULATION_ROUNDOFF * size + _SMALLEST)
        return Computed(product(self.value, other.value), off + roundings)


def rounded(value: Wide, error: Wide | float = 0.0, roundings: float = 1) -> Computed:
    """Numbers that are off by `error` after so many further roundings of them."""
    return Computed(value, error + roundings * ACCUMULATION_ROUNDOFF * (np.abs(value) + error) + _SMALLEST)


def exact(value: npt.NDArray[Any]) -> Computed:
    """Numbers that float32 holds."""
    wide = value.astype(np.float64)
    return Computed(wide, np.zeros(wide.shape))


def decays(a_log: npt.NDArray[Any], a: npt.NDArray[Any], dt_bias: npt.NDArray[Any]) -> Computed:
    """``exp(-exp(a_log) * softplus(a + dt_bias))``.

    The sum's rounding moves softplus by its slope, which is a sigmoid. An exponential of four units, a logarithm whose
    condition is 1 at most, a quotient and its series make twelve; exp(a_log) has three and the product one.
    """
    z = a.astype(np.float64) + dt_bias
    rate = np.exp(a_log.astype(np.float64))
    exponent = rate * np.logaddexp(0.0, z)
    off = ACCUMULATION_ROUNDOFF * (rate * sigmoid(z) * np.abs(z) + 16 * exponent)
    value = np.exp(-exponent)
    return rounded(value, value * np.expm1(off), 4)
