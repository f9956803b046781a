"""Decoder layer: attention and feed-forward block, each behind a norm and around the residual stream.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from pocketllm.kernels.attention_block import spec as attention_block
from pocketllm.kernels.attention_block.spec import AttentionBlock
from pocketllm.kernels.contract import Array, Arrays, BenchShape, BoundOp, Case, Dims, Operand, OpSpec, OpTable
from pocketllm.kernels.mlp import spec as mlp
from pocketllm.kernels.rms_norm.spec import make_eps


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer(AttentionBlock):
    """Scalars of the op: those of `attention_block`, and its own.

    Attributes:
        eps: of both norms, whose weights `norm_offset` is added to as well.
    """

    eps: float


def compose(ops: OpTable, s: DecoderLayer, weights: Arrays) -> BoundOp:
    """``x += attention(norm(x)); x += mlp(norm(x))``.

    The parts' weights keep their names.
    """
    of_attention = {field.name: getattr(s, field.name) for field in fields(AttentionBlock)}
    attention = ops.bind("attention_block", part(weights, attention_block.WEIGHTS), **of_attention)
    return around_residual(ops, attention, weights, eps=s.eps, norm_offset=s.norm_offset)


def around_residual(ops: OpTable, mixer: BoundOp, weights: Arrays, *, eps: float, norm_offset: float) -> BoundOp:
    """``x += mixer(norm(x)); x += mlp(norm(x))``, in place; the mixer is called with what follows `x`."""
    feed_forward = ops.bind("mlp", part(weights, mlp.WEIGHTS))
    attention_norm, mlp_norm = (
        ops.bind("rms_norm", {"weight": weights[name]}, eps=eps, weight_offset=norm_offset)
        for name in ("attention_norm", "mlp_norm")
    )
    add = ops.bind("add")

    def layer(x: Array, *step: Array, **named: Array) -> None:
        mixed = mixer(attention_norm(x), *step, **named)
        add(x, feed_forward(mlp_norm(mixed, residual=x)))

    return layer


def part(weights: Arrays, operands: tuple[Operand, ...]) -> Arrays:
    """Those of a composite's weights that one of its parts has."""
    return {operand.name: weights[operand.name] for operand in operands if operand.name in weights}


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A random layer of a random family."""
    norms = rng.uniform(0.5, 1.5, size=(2, dims["hidden"])).astype(np.float32)
    weights = {
        "attention_norm": norms[0],
        "mlp_norm": norms[1],
        **attention_block.make_weights(rng, dims),
        **mlp.make_weights(rng, dims),
    }
    scalars = DecoderLayer(eps=make_eps(rng), **attention_block.make_scalars(rng, dims))
    return Case(scalars, weights, attention_block.make_arrays(rng, dims))


def _bench(sequences: int, new: int, context: int) -> BenchShape:
    dims = attention_block.bench_dims(sequences, new, context) | {"N": 1536}
    rows, q, kv, hidden, inner = sequences * new, 576, 192, 576, 1536
    weights = hidden * (2 * q + 2 * kv + 3 * inner)
    pairs = sequences * sum(range(context - new + 1, context + 1))
    return BenchShape(
        dims,
        nbytes=4 * (weights + 2 * rows * hidden + 2 * sequences * context * kv),
        operations=2 * rows * weights + 4 * pairs * q,
    )


SPEC = OpSpec(
    name="decoder_layer",
    summary="Pre-norm decoder layer: attention block and feed-forward block around the residual stream, in place.",
    scalars=DecoderLayer,
    operands=(
        Operand("attention_norm", ("hidden",), dtype="float32", role="weight"),
        Operand("mlp_norm", ("hidden",), dtype="float32", role="weight"),
        *attention_block.WEIGHTS,
        *mlp.WEIGHTS,
        Operand("x", ("T", "hidden"), role="inout"),
        *attention_block.STEP,
    ),
    make_case=make_case,
    dims={**attention_block.DIMS, "N": (1, 40)},
    compose=compose,
    bench=(_bench(1, 1, 1024), _bench(8, 1, 1024), _bench(1, 512, 512)),
)
