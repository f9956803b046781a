"""The ops, their contracts and who implements them, as plain values for tables and JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pocketllm.kernels.checking.arrays import backend_names
from pocketllm.kernels.checking.discovery import obstacle, parts_of
from pocketllm.kernels.contract import OpSpec
from pocketllm.kernels.registry import backends_of, op_names, spec

_FOLDER = Path(__file__).parent.parent


def known_backends() -> tuple[str, ...]:
    """Every backend that implements an op or can be checked, in alphabetical order."""
    return tuple(sorted({name for op in op_names() for name in backends_of(op)} | set(backend_names())))


def op_facts(op: str) -> dict[str, Any]:
    """An op's name, its summary, the ops that it is made of, and how each backend serves it."""
    return {
        "op": op,
        "summary": spec(op).summary,
        "made of": sorted(parts_of(op)),
        "backends": {name: _service(op, name) for name in known_backends()},
    }


def _service(op: str, backend: str) -> str:
    """``own``, ``composed``, or ``none`` with the reason."""
    if backend in backends_of(op):
        return "own"
    reason = obstacle(op, backend)
    return "composed" if reason is None else f"none: {reason}"


def contract_facts(op: str) -> dict[str, Any]:
    """`op_facts`, and what the contract says: scalars, operands, sizes of tests and of timings; the files in it."""
    contract = spec(op)
    return op_facts(op) | {
        "scalars": _scalars(contract),
        "operands": [dataclasses.asdict(operand) for operand in contract.operands],
        "sizes": {name: list(ends) for name, ends in contract.dims.items()},
        "results": _results(contract),
        "timed at": [dataclasses.asdict(shape) for shape in contract.bench],
        "files": sorted(path.name for path in (_FOLDER / op).iterdir() if path.suffix in (".py", ".cu")),
    }


def _scalars(contract: OpSpec) -> list[dict[str, Any]]:
    return [
        {"name": field.name, "type": str(field.type)}
        | ({} if field.default is dataclasses.MISSING else {"default": field.default})
        for field in dataclasses.fields(contract.scalars)
    ]


def _results(contract: OpSpec) -> str:
    """How close a result has to be to the reference's."""
    if contract.compose is not None:
        return "within what the bounds of its parts allow"
    if contract.choices is not None:
        return "decisions: one of those that rounding allows"
    return "exact" if contract.error_bound is None else "within the contract's error bound"
