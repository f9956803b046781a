"""Composites over block-quantised weights in Numba, against the same compositions of references.

A number that rounding moves across the middle between two int8 codes moves its results by a whole step, which no bound
of rounding covers. It is rare: nearly all results have to agree closely, and all of them to a few steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pocketllm.kernels.checking.arrays import FLOAT32, backend
from pocketllm.kernels.checking.comparison import reference_results
from pocketllm.kernels.contract import Case, OpTable
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES
from pocketllm.kernels.quantized_linear.op_table import QuantizedReferenceOpTable
from pocketllm.kernels.quantized_linear.spec import make_weight
from pocketllm.kernels.registry import ReferenceOpTable, spec

CLOSE, STEPS = 1e-5, 0.05
SIZES = {"T": 6, "R": 4, "V": 77, "hidden": 256, "N": 512, "kv_heads": 2, "group": 4, "F": 16, "rest": 0, "S": 3}


def quantized_case(op: str, format: str, seed: int) -> Case:
    rng, contract = np.random.default_rng(seed), spec(op)
    dims = {name: SIZES.get(name, high) for name, (_, high) in contract.dims.items()}
    case = contract.make_case(rng, dims)
    matrices = {
        name: make_weight(rng, format, array.shape)
        for name, array in case.weights.items()
        if array.ndim == 2 and "norm" not in name
    }
    weights: dict[str, Any] = {**case.weights, **matrices}
    return Case(case.scalars, weights, case.arrays)


def results(case: Case, op: str, table: OpTable) -> np.ndarray:
    found = reference_results(spec(op), case, table)
    return np.concatenate([array[~np.isnan(array)].astype(np.float64) for array in found.values()])


@pytest.mark.parametrize("format", FORMATS_WITH_CODES)
@pytest.mark.parametrize("op", ["mlp", "lm_head", "attention_block", "decoder_layer"])
def test_composites_follow_their_weights(op: str, format: str) -> None:
    for seed in range(3):
        case = quantized_case(op, format, seed)
        expected = results(case, op, QuantizedReferenceOpTable())
        found = results(case, op, backend("numba").table(FLOAT32))
        size = np.abs(expected).max()
        error = np.abs(found - expected)
        assert np.median(error) <= CLOSE * size
        assert error.max() <= STEPS * size


def test_a_reference_that_is_told_nothing_takes_floating_point_weights_only() -> None:
    weight = make_weight(np.random.default_rng(0), "Q4_0", (3, 32))
    with pytest.raises(AttributeError):
        ReferenceOpTable().bind("linear", {"weight": weight})(np.ones((1, 32), dtype=np.float32))
