"""A step's plan as the flat batch that runtimes take, and what its logits are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.engine.scheduler import Plan
from pocketllm.engine.sequence import Sequence
from pocketllm.engine.states import NOWHERE
from pocketllm.runtimes.base import Batch


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A logits row that says how likely a token of a prompt was.

    Attributes:
        sequence: whose prompt.
        place: of the token in it.
        row: among the step's logits rows.
    """

    sequence: Sequence
    place: int
    row: int


@dataclass(frozen=True, slots=True)
class OutputRows:
    """What a step's logits are for.

    Attributes:
        batch_rows: the row of the flat batch behind each logits row.
        drawn: the logits rows that the plan's sampled sequences draw from, in their order.
        scored: the logits rows that score prompts.
    """

    batch_rows: tuple[int, ...]
    drawn: tuple[int, ...]
    scored: tuple[ScoredRow, ...]


def output_rows(plan: Plan) -> OutputRows:
    """The rows of the plan whose logits are wanted."""
    batch_rows: list[int] = []
    drawn: list[int] = []
    scored: list[ScoredRow] = []
    start = 0
    for work in plan.work:
        sequence = work.sequence
        if sequence.prompt_logprobs is not None:
            # Entries that an earlier pass over the prompt has found, before it was preempted, are not found again.
            first = max(sequence.computed + 1, len(sequence.prompt_logprobs))
            for place in range(first, min(sequence.computed + work.tokens + 1, sequence.prompt_length)):
                scored.append(ScoredRow(sequence, place, len(batch_rows)))
                batch_rows.append(start + place - 1 - sequence.computed)
        start += work.tokens
        if work.draws:
            drawn.append(len(batch_rows))
            batch_rows.append(start - 1)
    return OutputRows(tuple(batch_rows), tuple(drawn), tuple(scored))


def flat_batch(plan: Plan, rows: OutputRows, block_size: int) -> Batch:
    """The arrays of a plan with at least one piece of work, for a cache with blocks of `block_size` tokens."""
    work = plan.work
    ends = np.cumsum([item.tokens for item in work])
    # A sequence holds blocks for tokens to come, too: the runtime gets those that the step reads or writes.
    tables = [w.sequence.blocks[: -(-(w.sequence.computed + w.tokens) // block_size)] for w in work]
    block_table = np.full((len(work), max(map(len, tables))), -1, dtype=np.int32)
    for row, blocks in enumerate(tables):
        block_table[row, : len(blocks)] = blocks

    def int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array(values, dtype=np.int32)

    def span(sequence_start: int, count: int) -> range:
        return range(sequence_start, sequence_start + count)

    return Batch(
        token_ids=int32(
            [t for w in work for t in w.sequence.tokens[w.sequence.computed : w.sequence.computed + w.tokens]]
        ),
        positions=int32([p for w in work for p in span(w.sequence.computed, w.tokens)]),
        query_start=int32([0, *ends]),
        context_len=int32([w.sequence.computed + w.tokens for w in work]),
        block_table=block_table,
        state_slot=int32([w.sequence.states.source for w in work]),
        save_slot=int32([w.sequence.states.saves.get(row, NOWHERE) for w in work for row in range(w.tokens)]),
        rope_length=int32([w.sequence.most_tokens for w in work]),
        output_rows=int32(rows.batch_rows),
    )
