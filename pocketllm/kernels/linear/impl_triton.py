"""Linear layer in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.numerics_triton import narrow, product, widen


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program computes, and how: `rows` x `columns` outputs, over the inputs in steps of `depth`."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# One tile for every number of rows, so that a row's sum is the same bits in a prompt and in decoding. Decoding is bound
# by reading the weight, for which a tile's idle rows cost nothing.
_TENSOR_CORES = _Tile(rows=64, columns=64, depth=64, warps=4, stages=3)
_FLOAT32 = _Tile(rows=32, columns=64, depth=32, warps=4, stages=2)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, N, K, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    # Neighbouring programs share a tile of the weight.
    across = tl.cdiv(rows, BM)
    row = tl.program_id(0) % across * BM + tl.arange(0, BM)
    column = tl.program_id(0) // across * BN + tl.arange(0, BN)
    of_rows, of_columns = row < rows, column < N
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, K, BK):
        left = start + k < K
        a = tl.load(x_at + start, mask=of_rows[:, None] & left[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=of_columns[None, :] & left[:, None], other=0.0)
        total = product(a, b, total)
    if HAS_BIAS:
        total += widen(tl.load(bias + column, mask=of_columns, other=0.0))[None, :]
    at = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, narrow(total, out.dtype.element_ty), mask=of_rows[:, None] & of_columns[None, :])


def supports(call: OpCall) -> str | None:
    """Every floating-point weight is served; Triton runtimes expand the other formats when they load."""
    weight = call.weights["weight"]
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return "the weight is not a floating-point tensor"
    return None


def bind(call: OpCall) -> BoundOp:
    """Weight and bias keep their dtypes; where the weight's is not that of the activations, products are float32."""
    weight: torch.Tensor = call.weights["weight"]
    bias: torch.Tensor | None = call.weights.get("bias")
    dtype: torch.dtype = getattr(torch, call.dtype)
    outputs, inputs = weight.shape
    tile = _TENSOR_CORES if weight.dtype == dtype == torch.bfloat16 else _FLOAT32

    def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, outputs) if out is None else out
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns)
        _linear[(programs,)](
            x,
            weight,
            bias,
            out,
            rows,
            outputs,
            inputs,
            HAS_BIAS=bias is not None,
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out

    return linear
