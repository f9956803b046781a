"""Sampling: the token each row draws from its logits, a pure function of logits, settings, seed and position.

Sources: Gumbel-max: Maddison et al., "A* Sampling", 2014; top-k: Fan et al., 2018; top-p: Holtzman et al., "The Curious
Case of Neural Text Degeneration", 2020; min-p: Nguyen et al., "Turning Up the Heat", 2024; repetition penalty: Keskar
et al., "CTRL", 2019.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import BenchShape, Case, Dims, NoScalars, Operand, OpSpec
from pocketllm.kernels.sample.reference import decide, reference, rows


def choices(case: Case) -> list[frozenset[int]]:
    """The ids that each row can come to; more than one where two lie within a few roundings of each other."""
    return [decide(row).choices for row in rows(case.arrays)]


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Rows of every kind, with equal logits, -inf, NaN, adjustments and masks now and then."""
    count, vocabulary = dims["R"], dims["V"]
    logits = (rng.standard_normal((count, vocabulary)) * 4).astype(np.float32)
    if rng.integers(3) == 0:
        logits = np.round(logits)
    if rng.integers(3) == 0:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[rng.random(count) < 0.05, rng.integers(vocabulary)] = rng.choice([np.nan, np.inf])
    arrays = {"logits": logits, **_settings(rng, count, vocabulary)}
    if rng.integers(2):
        arrays |= _adjustments(rng, count, vocabulary)
    if rng.integers(2):
        few = rng.random((count, 1)) ** 2
        allowed = np.zeros((count, -(-vocabulary // 32) * 32), dtype=np.uint8)
        allowed[:, :vocabulary] = rng.random((count, vocabulary)) < few
        arrays["allowed"] = np.packbits(allowed, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    return Case(NoScalars(), {}, arrays)


def _settings(rng: np.random.Generator, count: int, vocabulary: int) -> dict[str, npt.NDArray[Any]]:
    def some(off: float, on: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return np.where(rng.integers(0, 2, size=count) == 0, off, on).astype(np.float32)

    return {
        "seed": rng.integers(0, 2**64, size=count, dtype=np.uint64),
        "position": rng.integers(0, 2**31, size=count, dtype=np.int32),
        "temperature": some(0.0, rng.uniform(0.1, 2.0, size=count))
        if rng.integers(2)
        else some(1.0, np.full(count, 0.7)),
        "top_k": rng.choice([0, 0, -1, 1, 5, vocabulary, 2 * vocabulary], size=count).astype(np.int32),
        "top_p": some(1.0, rng.uniform(0.01, 1.0, size=count)),
        "min_p": some(0.0, rng.uniform(0.0, 1.0, size=count) ** 3),
        "frequency_penalty": some(0.0, rng.uniform(-2, 2, size=count)),
        "presence_penalty": some(0.0, rng.uniform(-2, 2, size=count)),
        "repetition_penalty": some(1.0, rng.uniform(0.5, 2, size=count)),
    }


def _adjustments(rng: np.random.Generator, count: int, vocabulary: int) -> dict[str, npt.NDArray[Any]]:
    most = min(vocabulary, 20)
    ids = [rng.permutation(vocabulary)[: rng.integers(0, most + 1)] for _ in range(count)]
    total = sum(map(len, ids))
    counts = rng.integers(0, 4, size=total) * rng.integers(0, 2, size=total)
    return {
        "adjust_start": np.cumsum([0, *map(len, ids)]).astype(np.int32),
        "adjust_ids": np.concatenate([*ids, np.empty(0)]).astype(np.int32),
        "adjust_bias": (rng.integers(0, 2, size=total) * rng.uniform(-10, 10, size=total)).astype(np.float32),
        "adjust_count": counts.astype(np.int32),
        "adjust_seen": (counts > 0) | (rng.random(total) < 0.3),
    }


def _row(name: str, dtype: str) -> Operand:
    return Operand(name, ("R",), dtype=dtype, host=True)


def _adjustment(name: str, dtype: str) -> Operand:
    return Operand(name, ("A",), dtype=dtype, host=True, optional=True)


SPEC = OpSpec(
    name="sample",
    summary="Draws a token per row: bias, penalties, mask, temperature, top-k, top-p, min-p, keyed Gumbel noise.",
    scalars=NoScalars,
    operands=(
        Operand("logits", ("R", "V")),
        _row("seed", "uint64"),
        _row("position", "int32"),  # absolute position of the token that is drawn
        _row("temperature", "float32"),
        _row("top_k", "int32"),
        _row("top_p", "float32"),
        _row("min_p", "float32"),
        _row("frequency_penalty", "float32"),
        _row("presence_penalty", "float32"),
        _row("repetition_penalty", "float32"),
        # Sparse adjustments, all five or none: row r has entries adjust_start[r] up to adjust_start[r + 1], each of
        # another id.
        Operand("adjust_start", ("R+1",), dtype="int32", host=True, optional=True),
        _adjustment("adjust_ids", "int32"),
        _adjustment("adjust_bias", "float32"),
        _adjustment("adjust_count", "int32"),  # times generated so far
        _adjustment("adjust_seen", "bool"),  # in the prompt or generated
        # Bit id % 32 of word id // 32; bits beyond the vocabulary do not matter.
        Operand("allowed", ("R", "words"), dtype="uint32", host=True, optional=True),
        Operand("out", ("R",), dtype="int32", role="output"),
    ),
    reference=reference,
    make_case=make_case,
    choices=choices,
    dims={"R": (0, 6), "V": (1, 300)},
    bench=(BenchShape({"R": 8, "V": 49152}, nbytes=8 * 49152 * 4, operations=8 * 49152),),
)
