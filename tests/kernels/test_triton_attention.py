"""Triton's attention over several segments of keys: within the contract's bounds, and the bits of one segment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT16_CACHE, FLOAT32, Mode, backend
from pocketllm.kernels.checking.comparison import check, in_storage, scalars_of
from pocketllm.kernels.paged_attention import impl_triton
from pocketllm.kernels.registry import spec

BACKEND = backend("triton")
SEGMENT = 64
SIZES = {"S": 1, "kv_heads": 2, "group": 3, "D": 24, "block_size": 16, "new": 1, "ragged": 1}


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl_triton, "SEGMENT", SEGMENT)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16, FLOAT16_CACHE], ids=str)
def test_long_contexts(seed: int, mode: Mode) -> None:
    contract = spec("paged_attention")
    dims = SIZES | {"context": 150, "kv_heads": 1}
    check(contract, contract.make_case(np.random.default_rng(seed), dims), BACKEND, mode)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", [FLOAT32, BFLOAT16], ids=str)
def test_a_longer_table_changes_no_bit(seed: int, mode: Mode) -> None:
    """As when a longer sequence runs beside this one, whose keys then go through the merging of segments."""
    contract = spec("paged_attention")
    dims = SIZES | {"context": SEGMENT - 16}
    case = in_storage(contract, contract.make_case(np.random.default_rng(seed), dims), mode)
    dtypes = {operand.name: mode.dtype_of(operand) for operand in contract.operands}
    weights, arrays = (
        {name: BACKEND.put(array, dtypes[name]) for name, array in part.items()} for part in (case.weights, case.arrays)
    )
    attention = BACKEND.table(mode).bind("paged_attention", weights, **scalars_of(case))
    alone = attention(**arrays)
    table = torch.nn.functional.pad(arrays["block_table"], (0, 20), value=-1)
    assert torch.equal(attention(**arrays | {"block_table": table}), alone)
