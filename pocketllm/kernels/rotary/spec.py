"""Rotary position embedding: pairs of each head's numbers turned by the position's angles.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    """Scalars of the op.

    Attributes:
        interleaved: pairs are neighbours (2i, 2i + 1), as llama's own code and GGUF files have them; else they are
            halves (i, i + F), as transformers has them.
    """

    interleaved: bool = False


def pairs_of(x: npt.NDArray[Any], pairs: int, interleaved: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views of the first and second members [T, heads, F] of the rotated pairs."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def reference(s: Rotary, *, x: npt.NDArray[Any], angles: npt.NDArray[Any]) -> None:
    """``first, second = first * cos - second * sin, second * cos + first * sin``; numbers beyond 2F stay."""
    cos, sin = (angles[:, None, part].astype(np.float64) for part in (0, 1))
    first, second = pairs_of(x, angles.shape[2], s.interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    first[...], second[...] = turned


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Full and partial rotation, both pairings."""
    pairs = dims["F"]
    x = rng.standard_normal((dims["T"], dims["heads"], 2 * pairs + dims["rest"]), dtype=np.float32)
    angle = rng.uniform(-np.pi, np.pi, size=(dims["T"], pairs))
    angles = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    return Case(Rotary(interleaved=bool(rng.integers(2))), {}, {"x": x, "angles": angles})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """Two products and a sum are computed, their result is stored, the reference is rounded."""
    x, angles = (np.abs(case.arrays[name].astype(np.float64)) for name in ("x", "angles"))
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    first, second = pairs_of(x, angles.shape[2], case.scalars.interleaved)
    turned = case.arrays["x"].astype(np.float64)
    reference(case.scalars, x=turned, angles=case.arrays["angles"])
    bound = np.zeros_like(x)
    of_first, of_second = pairs_of(bound, angles.shape[2], case.scalars.interleaved)
    of_first[...] = 3 * ACCUMULATION_ROUNDOFF * (first * cos + second * sin)
    of_second[...] = 3 * ACCUMULATION_ROUNDOFF * (second * cos + first * sin)
    rotated = slice(0, 2 * angles.shape[2])
    bound[..., rotated] += 2 * u * np.abs(turned[..., rotated])
    return {"x": bound}


SPEC = OpSpec(
    name="rotary",
    summary="Rotates the leading numbers of every head in place.",
    scalars=Rotary,
    operands=(
        Operand("x", ("T", "heads", "D"), role="inout"),
        Operand("angles", ("T", 2, "F"), dtype="float32"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "heads": (1, 4), "F": (1, 32), "rest": (0, 8)},
    error_bound=error_bound,
    bench=(
        BenchShape(
            {"T": 512, "heads": 32, "F": 64, "rest": 0},
            nbytes=512 * 4 * (2 * 32 * 128 + 2 * 64),
            operations=512 * 32 * 64 * 6,
        ),
    ),
)
