"""The gated delta rule in CUDA C: a block holds some columns of a head's state, from a sequence's first row on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.gated_delta_rule.spec import GatedDeltaRule
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle

_LARGEST = 256
"""Numbers of a key for which a share of a state's column fits into the registers of one thread."""

_SHARES, _COLUMNS = 4, 32
"""Threads that hold a column, and columns of a block."""


@cache
def _kernel(device: str, dtype: str, keys: int) -> Kernel:
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"gated_delta_rule<{c_type(dtype)}, {keys}, {_SHARES}, {_COLUMNS}>",
        mixed=readonly(dtype),
        a=readonly(dtype),
        b=readonly(dtype),
        state=array("float32"),
        query_start=readonly("int32"),
        state_slot=readonly("int32"),
        save_slot=readonly("int32"),
        a_log=readonly("float32"),
        dt_bias=readonly("float32"),
        out=array(dtype),
        key_heads=scalar("int32"),
        value_heads=scalar("int32"),
        key_dim=scalar("int32"),
        value_dim=scalar("int32"),
        eps=scalar("float32"),
    )


def supports(call: OpCall) -> str | None:
    """Keys whose share of a state fits into registers."""
    size = call.scalars.key_dim
    if size > _LARGEST:
        return f"keys of {size} numbers are longer than {_LARGEST}"
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Everything in float32 whatever the activation dtype, one rounding of the outputs at the end."""
    s: GatedDeltaRule = call.scalars
    a_log, dt_bias, arrays = call.weights["a_log"], call.weights["dt_bias"], array_module(call.device)
    fours = 4 * _SHARES
    kernel = _kernel(call.device, call.dtype, -(-s.key_dim // fours) * fours).request()
    sizes = s.key_heads, s.value_heads, s.key_dim, s.value_dim

    def gated_delta_rule(
        mixed: Array,
        a: Array,
        b: Array,
        state: Array,
        query_start: Array,
        state_slot: Array,
        save_slot: Array,
        out: Array | None = None,
    ) -> Array:
        out = arrays.empty((len(mixed), s.value_heads, s.value_dim), mixed.dtype) if out is None else out
        sequences = len(state_slot) if len(mixed) else 0
        grid = [sequences, s.value_heads, -(-s.value_dim // _COLUMNS)]
        batch = query_start, state_slot, save_slot
        kernel(grid, [_SHARES * _COLUMNS], mixed, a, b, state, *batch, a_log, dt_bias, out, *sizes, s.eps)
        return out

    return gated_delta_rule
