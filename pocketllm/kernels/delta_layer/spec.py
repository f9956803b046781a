"""Delta layer: Gated DeltaNet and feed-forward block, each behind a norm and around the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from pocketllm.kernels.contract import Arrays, BenchShape, BoundOp, Case, Dims, Operand, OpSpec, OpTable
from pocketllm.kernels.decoder_layer.spec import around_residual, part
from pocketllm.kernels.delta_block import spec as delta_block
from pocketllm.kernels.delta_block.spec import DeltaBlock
from pocketllm.kernels.mlp import spec as mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer(DeltaBlock):
    """Scalars of the op: those of `delta_block`, whose `eps` is that of every norm of the layer, and its own.

    Attributes:
        norm_offset: added to the weights of the two norms of the layer, not to the gated norm's.
    """

    norm_offset: float = 0.0


def compose(ops: OpTable, s: DeltaLayer, weights: Arrays) -> BoundOp:
    """``x += delta(norm(x)); x += mlp(norm(x))``.

    The parts' weights keep their names.
    """
    of_delta = {field.name: getattr(s, field.name) for field in fields(DeltaBlock)}
    delta = ops.bind("delta_block", part(weights, delta_block.WEIGHTS), **of_delta)
    return around_residual(ops, delta, weights, eps=s.eps, norm_offset=s.norm_offset)


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A random layer."""
    norms = rng.uniform(0.5, 1.5, size=(2, dims["hidden"])).astype(np.float32)
    weights = {
        "attention_norm": norms[0],
        "mlp_norm": norms[1],
        **delta_block.make_weights(rng, dims),
        **mlp.make_weights(rng, dims),
    }
    scalars = DeltaLayer(norm_offset=float(rng.integers(2)), **delta_block.make_scalars(rng, dims))
    return Case(scalars, weights, delta_block.make_arrays(rng, dims))


def _bench(sequences: int, new: int) -> BenchShape:
    inner, hidden, rows = 3584, 1024, sequences * new
    nbytes, operations = delta_block.bench_cost(sequences, new)
    return BenchShape(
        delta_block.bench_dims(sequences, new) | {"N": inner},
        nbytes=nbytes + 4 * 3 * hidden * inner,
        operations=operations + 6 * rows * hidden * inner,
    )


SPEC = OpSpec(
    name="delta_layer",
    summary="Pre-norm layer: Gated DeltaNet and feed-forward block around the residual stream, in place.",
    scalars=DeltaLayer,
    operands=(
        Operand("attention_norm", ("hidden",), dtype="float32", role="weight"),
        Operand("mlp_norm", ("hidden",), dtype="float32", role="weight"),
        *delta_block.WEIGHTS,
        *mlp.WEIGHTS,
        Operand("x", ("T", "hidden"), role="inout"),
        *delta_block.STEP,
    ),
    make_case=make_case,
    dims={**delta_block.DIMS, "N": (1, 40)},
    compose=compose,
    bench=(_bench(1, 1), _bench(8, 1), _bench(1, 128)),
)
