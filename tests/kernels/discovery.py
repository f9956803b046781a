"""Which ops, backends and dtypes there are to test, found from the folders alone."""

from __future__ import annotations

from hypothesis import strategies as st

from pocketllm.kernels.checking.arrays import Backend, Mode, backend, backend_names
from pocketllm.kernels.checking.discovery import modes_of, served_ops
from pocketllm.kernels.contract import OpSpec


def implementations() -> list[tuple[str, Backend, Mode]]:
    """Every op with every backend that serves it, in every mode that can make a difference to it."""
    backends = [backend(name) for name in backend_names()]
    return [(op, found, mode) for found in backends for op in served_ops(found.name) for mode in modes_of(op, found)]


def sizes(contract: OpSpec) -> st.SearchStrategy[dict[str, int]]:
    """Sizes within the contract's ranges."""
    return st.fixed_dictionaries({name: st.integers(low, high) for name, (low, high) in contract.dims.items()})
