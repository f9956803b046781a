"""Key and value cache: a step's new entries put into their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import BenchShape, Case, Dims, NoScalars, Operand, OpSpec


def reference(
    s: NoScalars,
    *,
    key: npt.NDArray[Any],
    value: npt.NDArray[Any],
    key_cache: npt.NDArray[Any],
    value_cache: npt.NDArray[Any],
    slots: npt.NDArray[Any],
) -> None:
    """``cache[slot // block_size, slot % block_size] = row``, rounded to the cache's dtype; slots are distinct."""
    block, offset = np.divmod(slots, key_cache.shape[1])
    key_cache[block, offset] = key
    value_cache[block, offset] = value


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Slots anywhere in a cache that has room for them and more."""
    size, entry = dims["block_size"], (dims["kv_heads"], dims["D"])
    blocks = -(-dims["T"] // size) + 2
    cache, rows = (blocks, size, *entry), (dims["T"], *entry)
    shapes = {"key": rows, "value": rows, "key_cache": cache, "value_cache": cache}
    arrays: dict[str, npt.NDArray[Any]] = {
        name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }
    arrays["slots"] = rng.permutation(blocks * size)[: dims["T"]]
    return Case(NoScalars(), {}, arrays)


SPEC = OpSpec(
    name="kv_write",
    summary="Writes a step's keys and values into their slots of the paged cache.",
    scalars=NoScalars,
    operands=(
        Operand("key", ("T", "kv_heads", "D")),
        Operand("value", ("T", "kv_heads", "D")),
        Operand("key_cache", ("blocks", "block_size", "kv_heads", "D"), dtype="cache", role="inout"),
        Operand("value_cache", ("blocks", "block_size", "kv_heads", "D"), dtype="cache", role="inout"),
        Operand("slots", ("T",), dtype="int64"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 20), "kv_heads": (1, 3), "D": (1, 40), "block_size": (1, 8)},
    bench=(
        BenchShape(
            {"T": 512, "kv_heads": 8, "D": 128, "block_size": 16}, nbytes=4 * 4 * 512 * 8 * 128 + 8 * 512, operations=0
        ),
    ),
)
