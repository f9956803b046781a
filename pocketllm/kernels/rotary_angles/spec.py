"""Rotary angles: cosine and sine of position times frequency, once a step for all layers.

Sources: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Dynamic scaling: "NTK-aware
scaled RoPE" with the length taken from the sequence, as transformers computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Scalars of the op.

    Attributes:
        inverse_frequencies: radians a position, one for each of the F rotated pairs.
        attention_factor: multiplies cosine and sine (yarn and longrope lengthen the vectors with it).
        dynamic_factor: factor of dynamic NTK scaling; 0 turns it off.
        original_length: tokens the model was trained on; dynamic scaling starts beyond it.
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    dynamic_factor: float = 0.0
    original_length: int = 0


def plain_frequencies(s: RotaryAngles, divisors: npt.NDArray[Any] | None) -> npt.NDArray[np.float32]:
    """The frequencies [F] without dynamic scaling: rounded to float32, then divided, and rounded again."""
    plain: npt.NDArray[np.float32] = np.array(s.inverse_frequencies, dtype=np.float32)
    divided: npt.NDArray[np.float32] = plain if divisors is None else np.divide(plain, divisors, dtype=np.float32)
    return divided


def stretched_frequencies(
    s: RotaryAngles, plain: npt.NDArray[np.float32], lengths: npt.NDArray[Any]
) -> npt.NDArray[np.float32]:
    """The frequencies [T, F] under dynamic scaling, in radians a token; `lengths` is [T], in tokens.

    A sequence of L tokens, L at least the original length, stretches the rotary base by
    ``a = (f * L / original - (f - 1)) ** (d / (d - 2))`` with d = 2F; frequency i shrinks by ``a ** (2 i / d)``.
    """
    pairs = plain.shape[0]
    length = np.maximum(lengths.astype(np.float64), s.original_length)
    growth = s.dynamic_factor * length / s.original_length - (s.dynamic_factor - 1.0)
    # The two exponents multiplied. A single pair keeps its frequency, so its division by zero is avoided.
    exponent = -2.0 * np.arange(pairs) / max(2 * pairs - 2, 1)
    return np.asarray(plain.astype(np.float64) * growth[:, None] ** exponent, dtype=np.float32)


def angles(
    s: RotaryAngles,
    positions: npt.NDArray[Any],
    lengths: npt.NDArray[Any] | None,
    divisors: npt.NDArray[Any] | None,
) -> npt.NDArray[np.float32]:
    """The angles [T, F] in radians, each product rounded to float32.

    That rounding is part of the definition: at position 100,000 it moves an angle by up to 0.004, and models were
    trained with it.
    """
    frequencies = plain_frequencies(s, divisors)
    if s.dynamic_factor:
        if lengths is None:
            raise TypeError("rotary_angles: dynamic scaling needs lengths")
        frequencies = stretched_frequencies(s, frequencies, lengths)
    return np.asarray(positions.astype(np.float32)[:, None] * frequencies, dtype=np.float32)


def reference(
    s: RotaryAngles,
    *,
    positions: npt.NDArray[Any],
    lengths: npt.NDArray[Any] | None = None,
    divisors: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.float32]:
    """``out[t, 0] = cos(angle) * factor, out[t, 1] = sin(angle) * factor``."""
    angle = angles(s, positions, lengths, divisors).astype(np.float64)
    return (np.stack([np.cos(angle), np.sin(angle)], axis=1) * s.attention_factor).astype(np.float32)


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Positions near and far, frequencies of a usual base, now and then divided, now and then with dynamic scaling."""
    pairs = dims["F"]
    frequencies = tuple(10000.0 ** (-i / pairs) for i in range(pairs))
    positions = (2.0 ** rng.uniform(0, 17, size=dims["T"]) - 1).astype(np.int32)
    arrays = {"positions": positions}
    factor = float(rng.choice([1.0, 1.2]))
    scalars = RotaryAngles(frequencies, factor)
    if rng.integers(2):
        scalars = RotaryAngles(frequencies, factor, dynamic_factor=float(rng.uniform(1, 8)), original_length=2048)
        arrays["lengths"] = positions + rng.integers(1, 100, size=dims["T"], dtype=np.int32)
    divided = rng.integers(2) == 1
    weights = {"divisors": rng.uniform(1, 32, size=pairs).astype(np.float32)} if divided else {}
    return Case(scalars, weights, arrays)


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """Cosine and sine err by two units of one, the factor and the two roundings by one each; `u` does not matter.

    Without dynamic scaling the angle is exact by definition. With it the scaled frequency may come out as the next
    float32, one unit in the last place away, and the rounding of the product moves with it.
    """
    arrays = case.arrays
    angle = np.abs(angles(case.scalars, arrays["positions"], arrays.get("lengths"), case.weights.get("divisors")))
    moved = 4 * ACCUMULATION_ROUNDOFF * angle.astype(np.float64) if case.scalars.dynamic_factor else 0.0 * angle
    bound = (5 * ACCUMULATION_ROUNDOFF + moved) * case.scalars.attention_factor
    return {"out": np.stack([bound, bound], axis=1).astype(np.float64)}


SPEC = OpSpec(
    name="rotary_angles",
    summary="Cosine and sine of the rotary angles of each position.",
    scalars=RotaryAngles,
    operands=(
        Operand("divisors", ("F",), dtype="float32", role="weight", optional=True),
        Operand("positions", ("T",), dtype="int32"),
        Operand("lengths", ("T",), dtype="int32", optional=True),
        Operand("out", ("T", 2, "F"), dtype="float32", role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "F": (1, 64)},
    error_bound=error_bound,
    bench=(BenchShape({"T": 512, "F": 64}, nbytes=512 * 4 * (1 + 2 * 64), operations=3 * 512 * 64),),
)
