"""Rotary angles in Numba. Cosines and sines are those of float64, of angles that are float32 by definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, readonly
from pocketllm.kernels.rotary_angles.spec import plain_frequencies


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Fixes the frequencies."""
    s = call.scalars
    frequencies = plain_frequencies(s, call.weights.get("divisors"))
    factor, dynamic, original = float(s.attention_factor), float(s.dynamic_factor), int(s.original_length)
    kernel = KERNEL.request()

    def rotary_angles(
        positions: npt.NDArray[Any], lengths: npt.NDArray[Any] | None = None, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        if lengths is None:
            if dynamic:
                raise TypeError("rotary_angles: dynamic scaling needs lengths")
            lengths = positions
        out = np.empty((len(positions), 2, len(frequencies)), dtype=np.float32) if out is None else out
        kernel(positions, lengths, frequencies, factor, dynamic, original, out)
        return out

    return rotary_angles


def _rotary_angles(
    positions: Any, lengths: Any, frequencies: Any, factor: Any, dynamic: Any, original: Any, out: Any
) -> None:
    pairs = len(frequencies)
    for row in range(len(positions)):
        growth = 1.0
        if dynamic != 0.0:
            growth = dynamic * max(lengths[row], original) / original - (dynamic - 1.0)
        for pair in range(pairs):
            frequency = frequencies[pair]
            if dynamic != 0.0:
                frequency = np.float32(np.float64(frequency) * growth ** (-2.0 * pair / max(2 * pairs - 2, 1)))
            angle = np.float64(np.float32(positions[row]) * frequency)
            out[row, 0, pair] = math.cos(angle) * factor
            out[row, 1, pair] = math.sin(angle) * factor


KERNEL = Kernel(
    _rotary_angles,
    readonly(types.int32, 1),
    readonly(types.int32, 1),
    readonly(types.float32, 1),
    types.float64,
    types.float64,
    types.int64,
    array(types.float32, 3),
)
