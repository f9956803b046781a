"""The bytes of blocks and slots: one after another, whatever the layout, and back again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.models.family import PagedCache, StateCache
from pocketllm.runtimes.arrays import ArrayLibrary, NumpyArrays
from pocketllm.runtimes.cache_arrays import CacheArrays, Kind
from pocketllm.runtimes.torch_arrays import TorchArrays

ROWS = 5
LAYOUT = (
    {"key_cache": PagedCache((2, 3)), "value_cache": PagedCache((2,), dtype="float32")},
    {"conv": StateCache((3, 2)), "recurrent": StateCache((2,), dtype="float64")},
    {},
    {"key_cache": PagedCache((1,)), "conv": StateCache((1,))},
)
LIBRARIES = {
    "numpy": NumpyArrays(),
    "torch": TorchArrays("cpu", "float32"),
    "torch, bfloat16": TorchArrays("cpu", "bfloat16"),
}


def filled(arrays: ArrayLibrary) -> CacheArrays:
    """Caches whose every byte differs from its neighbours'."""
    caches = CacheArrays(LAYOUT, 4, arrays)
    caches.allocate(ROWS, ROWS)
    rng = np.random.default_rng(0)
    for kind in ("block", "state"):
        caches.write(kind, range(ROWS), rng.integers(0, 60, ROWS * caches.nbytes[kind], dtype=np.uint8).tobytes())
    return caches


@pytest.mark.parametrize("library", LIBRARIES)
@given(kind=st.sampled_from(["block", "state"]), rows=st.lists(st.integers(0, ROWS - 1), unique=True))
def test_several_are_the_bytes_of_each_one_after_another(library: str, kind: Kind, rows: list[int]) -> None:
    caches = filled(LIBRARIES[library])
    data = caches.read(kind, rows)
    assert data == b"".join(caches.read(kind, [row]) for row in rows)
    assert len(data) == len(rows) * caches.nbytes[kind]
    other = CacheArrays(LAYOUT, 4, LIBRARIES[library])
    other.allocate(ROWS, ROWS)
    turned = [ROWS - 1 - row for row in rows]
    other.write(kind, turned, data)
    assert other.read(kind, turned) == data
    rest = [row for row in range(ROWS) if row not in turned]
    assert not any(other.read(kind, rest))


def test_without_caches_of_a_kind_there_are_no_bytes() -> None:
    caches = CacheArrays(LAYOUT[:1], 4, NumpyArrays())
    caches.allocate(ROWS, 0)
    assert caches.read("state", [0, 1]) == b""
    caches.write("state", [0, 1], b"")
    with pytest.raises(ValueError, match="2 states hold 0 bytes; 1 were given"):
        caches.write("state", [0, 1], b"x")
