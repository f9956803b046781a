"""Which ops a backend serves, and how, found from the folders alone."""

from __future__ import annotations

from functools import cache

import numpy as np

from pocketllm.kernels.checking.arrays import Backend, Mode
from pocketllm.kernels.checking.comparison import scalars_of
from pocketllm.kernels.contract import Arrays, BoundOp
from pocketllm.kernels.registry import ReferenceOpTable, backends_of, op_names, spec

_CASES = 20


class _Recorder(ReferenceOpTable):
    """Notes which ops are bound."""

    def __init__(self) -> None:
        self.bound: set[str] = set()

    def bind(self, op: str, weights: Arrays | None = None, **scalars: object) -> BoundOp:
        self.bound.add(op)
        return super().bind(op, weights, **scalars)


@cache
def parts_of(op: str) -> frozenset[str]:
    """The ops that a composite is made of, their own parts included, over a few random cases; () for no composite."""
    recorder = _Recorder()
    contract = spec(op)
    if contract.compose is None:
        return frozenset()
    least = {name: low for name, (low, _) in contract.dims.items()}
    for seed in range(_CASES):
        case = contract.make_case(np.random.default_rng(seed), least)
        recorder.bind(op, case.weights, **scalars_of(case))
    return frozenset(recorder.bound - {op})


@cache
def obstacle(op: str, backend: str) -> str | None:
    """None where the backend has the op, itself or composed of others; else what it lacks."""
    if backend in backends_of(op):
        return None
    if spec(op).compose is None:
        return f"no impl_{backend}.py"
    lacking = sorted(part for part in parts_of(op) if obstacle(part, backend) is not None)
    return f"composed of ops that it lacks: {', '.join(lacking)}" if lacking else None


def modes_of(op: str, backend: Backend) -> tuple[Mode, ...]:
    """The modes of the backend that can make a difference to the op.

    A composite's tolerance is measured in float64, where a cache of another dtype does not round.
    """
    contract = spec(op)
    mixed = contract.compose is None and any(operand.dtype == "cache" for operand in contract.operands)
    return tuple(mode for mode in backend.modes if mixed or mode.dtype == mode.cache_dtype)


def served_ops(backend: str) -> tuple[str, ...]:
    """Every op that the backend serves, in alphabetical order."""
    return tuple(op for op in op_names() if obstacle(op, backend) is None)
