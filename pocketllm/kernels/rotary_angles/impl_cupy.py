"""Rotary angles in CUDA C: one thread a pair of a token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_THREADS = 64


@cache
def _kernel(device: str, dynamic: bool) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"rotary_angles<{str(dynamic).lower()}>",
        positions=readonly("int32"),
        lengths=readonly("int32", optional=True),
        frequencies=readonly("float32"),
        divisors=readonly("float32", optional=True),
        out=array("float32"),
        pairs=scalar("int32"),
        attention_factor=scalar("float64"),
        dynamic_factor=scalar("float64"),
        original_length=scalar("int32"),
    )


def supports(call: OpCall) -> str | None:
    """Every call is served where kernels can run."""
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Fixes the frequencies."""
    s, arrays = call.scalars, array_module(call.device)
    kernel = _kernel(call.device, bool(s.dynamic_factor)).request()
    frequencies = arrays.asarray(s.inverse_frequencies, dtype="float32")
    divisors, pairs = call.weights.get("divisors"), len(frequencies)

    def rotary_angles(positions: Array, lengths: Array | None = None, out: Array | None = None) -> Array:
        if s.dynamic_factor and lengths is None:
            raise TypeError("rotary_angles: dynamic scaling needs lengths")
        tokens = len(positions)
        out = arrays.empty((tokens, 2, pairs), dtype="float32") if out is None else out
        grid, numbers = [tokens, -(-pairs // _THREADS)], (s.attention_factor, s.dynamic_factor, s.original_length)
        kernel(grid, [_THREADS], positions, lengths, frequencies, divisors, out, pairs, *numbers)
        return out

    return rotary_angles
