"""Rotary position embedding in CUDA C: one thread a pair."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, obstacle

_THREADS = 128


@cache
def _kernel(device: str, dtype: str, interleaved: bool) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"rotary<{c_type(dtype)}, {str(interleaved).lower()}>",
        x=array(dtype),
        angles=readonly("float32"),
        heads=scalar("int32"),
        dim=scalar("int32"),
        pairs=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Fixes the pairing. The products are float32, as the angles are, and rounded when they are stored."""
    kernel = _kernel(call.device, call.dtype, call.scalars.interleaved).request()

    def rotary(x: Array, angles: Array) -> None:
        (tokens, heads, dim), pairs = x.shape, angles.shape[2]
        kernel([tokens, -(-heads * pairs // _THREADS)], [_THREADS], x, angles, heads, dim, pairs)

    return rotary
