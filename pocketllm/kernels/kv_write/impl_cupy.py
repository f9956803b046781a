"""Key and value cache writes in CUDA C."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, obstacle

_THREADS = 128


@cache
def _kernel(device: str, dtype: str, cache_dtype: str) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"kv_write<{c_type(dtype)}, {c_type(cache_dtype)}>",
        key=readonly(dtype),
        value=readonly(dtype),
        key_cache=array(cache_dtype),
        value_cache=array(cache_dtype),
        slots=readonly("int64"),
        n=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Nothing to fix."""
    kernel = _kernel(call.device, call.dtype, call.cache_dtype).request()

    def kv_write(key: Array, value: Array, key_cache: Array, value_cache: Array, slots: Array) -> None:
        tokens, heads, dim = key.shape
        n = heads * dim
        kernel([tokens, -(-n // _THREADS)], [_THREADS], key, value, key_cache, value_cache, slots, n)

    return kv_write
