"""Token embedding in CUDA C: the rows that are looked up are expanded from the table as it is held."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Array, BoundOp, OpCall
from pocketllm.kernels.jit.cuda_source import array, c_type, readonly, scalar, storage_dtype
from pocketllm.kernels.jit.toolchain_cupy import Kernel, array_module, obstacle
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES

_THREADS = 128
_FOUR = 4
"""Numbers that a thread expands from blocks."""


@cache
def _kernel(device: str, dtype: str, format: str | None) -> Kernel:
    types = c_type(dtype) if format is None else f"{format}, {c_type(dtype)}"
    return Kernel(
        device,
        Path(__file__).with_suffix(".cu"),
        f"{'look_up' if format is None else 'expand'}<{types}>",
        table=readonly(dtype if format is None else "uint8"),
        token_ids=readonly("int32"),
        out=array(dtype),
        hidden=scalar("int32"),
        scale=scalar("float32"),
    )


def supports(call: OpCall) -> str | None:
    """Tables as arrays in the activation dtype, and as a checkpoint stores them in a format with codes."""
    table = call.weights["table"]
    if isinstance(table, QuantTensor):
        if table.format not in FORMATS_WITH_CODES:
            return f"the table is in format {table.format}: expand it to an array when it is loaded"
        if table.layout != "rows":
            return f"the table has been repacked to layout {table.layout!r}; the kernels read rows"
    elif table.dtype != storage_dtype(call.dtype):
        return f"the table is an array of {table.dtype}, not of {storage_dtype(call.dtype)} as activations are"
    return obstacle(call.device)


def bind(call: OpCall) -> BoundOp:
    """Fixes the kernel of the table's format; the table stays as it is."""
    table = call.weights["table"]
    blocks = isinstance(table, QuantTensor)
    kernel = _kernel(call.device, call.dtype, table.format if blocks else None).request()
    data = table.data if blocks else table
    arrays, hidden, scale = array_module(call.device), table.shape[1], call.scalars.scale
    threads = hidden // _FOUR if blocks else hidden

    def embedding(token_ids: Array, out: Array | None = None) -> Array:
        tokens = len(token_ids)
        out = arrays.empty((tokens, hidden), storage_dtype(call.dtype)) if out is None else out
        kernel([tokens, -(-threads // _THREADS)], [_THREADS], data, token_ids, out, hidden, scale)
        return out

    return embedding
