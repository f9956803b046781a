"""How models call the op of an attention layer."""

from __future__ import annotations

from pocketllm.kernels.contract import Array, Arrays, BoundOp
from pocketllm.models.family import Step


def run_attention(layer: BoundOp, x: Array, angles: Array, step: Step, cache: Arrays) -> None:
    """A step of a bound ``decoder_layer`` on the residual stream x [T, hidden], in place."""
    layer(
        x,
        angles,
        cache["key_cache"],
        cache["value_cache"],
        step.slots,
        step.query_start,
        step.context_len,
        step.block_table,
    )
