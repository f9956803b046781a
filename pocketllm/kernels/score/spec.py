"""Scores of logits: what log probabilities are computed from, without moving whole rows to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class Score:
    """Scalars of the op.

    Attributes:
        k: how many of the largest logits to return, at most the size of the vocabulary.
    """

    k: int = 0


def reference(s: Score, *, logits: npt.NDArray[Any], targets: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """log-sum-exp, the target's logit, and the ids and logits of the k largest, in falling order, equal ones by id.

    A negative target means that the row has none: its target logit is NaN, so that using it by mistake shows. A logit
    of -inf is never among the largest: where fewer than k are left, the id is -1 and the logit -inf. The scores of a
    row that holds NaN are unspecified.
    """
    wide = logits.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        logsumexp = np.log(np.exp(wide - shift).sum(axis=1)) + shift[:, 0]
    target = np.where(targets >= 0, np.take_along_axis(wide, np.maximum(targets, 0)[:, None], axis=1)[:, 0], np.nan)
    ids = np.argsort(-wide, axis=1, kind="stable")[:, : s.k]
    values = np.take_along_axis(wide, ids, axis=1)
    ids = np.where(np.isneginf(values), -1, ids)
    return logsumexp.astype(np.float32), target.astype(np.float32), ids.astype(np.int32), values.astype(np.float32)


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Logits with many equal ones, some of them -inf, and rows without a target."""
    shape = (dims["R"], dims["V"])
    logits = (rng.standard_normal(shape) * 5).astype(np.float32)
    if rng.integers(2):
        logits = np.round(logits)
    logits[rng.random(shape) < rng.choice([0.0, 0.3, 0.95])] = -np.inf
    targets = rng.integers(-1, dims["V"], size=dims["R"], dtype=np.int32)
    return Case(Score(min(dims["k"], dims["V"])), {}, {"logits": logits, "targets": targets})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """V exponentials and their sum, the logarithm, the sum with the largest logit; all else is exact.

    Rounding ``logit - largest`` counts with the logit's probability; `u` does not matter, for nothing is stored in the
    activation dtype.
    """
    logsumexp = reference(case.scalars, **case.arrays)[0].astype(np.float64)
    finite = np.isfinite(logsumexp)
    wide = np.where(np.isfinite(case.arrays["logits"]), case.arrays["logits"], 0.0).astype(np.float64)
    span = np.ptp(wide, axis=1) if wide.size else np.zeros(len(wide))
    size = np.where(finite, np.abs(logsumexp), 0.0) + np.abs(wide.max(axis=1, initial=0.0))
    return {"logsumexp": ACCUMULATION_ROUNDOFF * (wide.shape[1] + 8 + span + 3 * size)}


SPEC = OpSpec(
    name="score",
    summary="Log-sum-exp, target logit and largest logits of each row.",
    scalars=Score,
    operands=(
        Operand("logits", ("R", "V")),
        Operand("targets", ("R",), dtype="int32"),
        Operand("logsumexp", ("R",), dtype="float32", role="output"),
        Operand("target_logit", ("R",), dtype="float32", role="output"),
        Operand("top_ids", ("R", "k"), dtype="int32", role="output"),
        Operand("top_logits", ("R", "k"), dtype="float32", role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"R": (0, 6), "V": (1, 200), "k": (0, 8)},
    error_bound=error_bound,
    bench=(BenchShape({"R": 8, "V": 49152, "k": 5}, nbytes=8 * 49152 * 4, operations=3 * 8 * 49152),),
)
