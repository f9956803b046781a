"""Token embedding: the rows of a table that the token ids name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import BenchShape, Case, Dims, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class Embedding:
    """Scalars of the op.

    Attributes:
        scale: multiplies every row; some families scale by the root of the hidden size.
    """

    scale: float = 1.0


def reference(s: Embedding, *, table: npt.NDArray[Any], token_ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``out[t] = table[token_ids[t]] * scale``."""
    out: npt.NDArray[Any] = (table[token_ids].astype(np.float64) * s.scale).astype(table.dtype)
    return out


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A normal table, ids from all of it, with or without a scale."""
    table = rng.standard_normal((dims["vocab"], dims["hidden"]), dtype=np.float32)
    token_ids = rng.integers(0, dims["vocab"], size=dims["T"], dtype=np.int32)
    scale = float(np.sqrt(dims["hidden"])) if rng.integers(2) else 1.0
    return Case(Embedding(scale), {"table": table}, {"token_ids": token_ids})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """Exact without a scale; else the scale, the product and the reference are rounded."""
    out = np.abs(reference(case.scalars, **case.weights, **case.arrays).astype(np.float64))
    return {"out": (0.0 if case.scalars.scale == 1.0 else 3 * u) * out}


SPEC = OpSpec(
    name="embedding",
    summary="Looks up the rows of a table, times a scale.",
    scalars=Embedding,
    operands=(
        Operand("table", ("vocab", "hidden"), dtype="weight", role="weight"),
        Operand("token_ids", ("T",), dtype="int32"),
        Operand("out", ("T", "hidden"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "vocab": (1, 50), "hidden": (1, 100)},
    error_bound=error_bound,
    bench=(BenchShape({"T": 512, "vocab": 4096, "hidden": 576}, nbytes=2 * 512 * 576 * 4, operations=0),),
)
