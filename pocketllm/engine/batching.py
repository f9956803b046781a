"""A step's plan as the flat batch that runtimes take."""

from __future__ import annotations

from typing import Any

import numpy as np

from pocketllm.engine.scheduler import Plan
from pocketllm.runtimes.base import Batch


def flat_batch(plan: Plan) -> Batch:
    """The arrays of a plan with at least one piece of work."""
    work = plan.work
    ends = np.cumsum([item.tokens for item in work])
    blocks_used = max(len(item.sequence.blocks) for item in work)
    block_table = np.full((len(work), blocks_used), -1, dtype=np.int32)
    for row, item in enumerate(work):
        block_table[row, : len(item.sequence.blocks)] = item.sequence.blocks

    def int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(values, dtype=np.int32)

    def span(sequence_start: int, count: int) -> range:
        return range(sequence_start, sequence_start + count)

    return Batch(
        token_ids=int32([t for w in work for t in w.sequence.tokens[w.sequence.computed :][: w.tokens]]),
        positions=int32([p for w in work for p in span(w.sequence.computed, w.tokens)]),
        query_start=int32([0, *ends]),
        context_len=int32([w.sequence.computed + w.tokens for w in work]),
        block_table=block_table,
        state_slot=np.zeros(len(work), dtype=np.int32),
        rope_length=int32([w.sequence.most_tokens for w in work]),
        output_rows=int32([end - 1 for w, end in zip(work, ends, strict=True) if w.completes]),
    )
