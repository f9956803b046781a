"""Which ops, backends and dtypes there are to test, found from the folders alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pocketllm.kernels.contract import Arrays, BoundOp, OpSpec
from pocketllm.kernels.registry import ReferenceOpTable, backends_of, op_names, spec
from tests.kernels.backends import BACKENDS, Backend, Mode


class _Recorder(ReferenceOpTable):
    def __init__(self) -> None:
        self.bound: set[str] = set()

    def bind_reference(self, contract: OpSpec, scalars: Any, weights: Arrays) -> BoundOp:
        self.bound.add(contract.name)
        return super().bind_reference(contract, scalars, weights)


@cache
def parts_of(op: str) -> frozenset[str]:
    """The ops with a reference that a composite comes down to, over a few random cases."""
    recorder = _Recorder()
    contract = spec(op)
    least = {name: low for name, (low, _) in contract.dims.items()}
    for seed in range(20):
        case = contract.make_case(np.random.default_rng(seed), least)
        scalars = {name: getattr(case.scalars, name) for name in contract.scalars.__dataclass_fields__}
        recorder.bind(op, case.weights, **scalars)
    return frozenset(recorder.bound)


def serves(backend: str, op: str) -> bool:
    """Whether the backend has the op, itself or composed of others."""
    if backend in backends_of(op):
        return True
    return spec(op).compose is not None and all(backend in backends_of(part) for part in parts_of(op))


def implementations() -> list[tuple[str, Backend, Mode]]:
    """Every op with every backend that serves it, in every mode that can make a difference to it."""
    found = []
    for op in op_names():
        has_cache = any(operand.dtype == "cache" for operand in spec(op).operands)
        for backend in BACKENDS.values():
            if not serves(backend.name, op):
                continue
            for mode in backend.modes:
                # A composite's tolerance is measured in float64, where a cache of another dtype does not round.
                mixed = mode.dtype != mode.cache_dtype
                if not mixed or (has_cache and spec(op).compose is None):
                    found.append((op, backend, mode))
    return found


def sizes(contract: OpSpec) -> st.SearchStrategy[dict[str, int]]:
    """Sizes within the contract's ranges."""
    return st.fixed_dictionaries({name: st.integers(low, high) for name, (low, high) in contract.dims.items()})
