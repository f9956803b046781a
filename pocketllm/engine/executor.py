"""A plan through the runtime: the batch is run, prompts are scored, tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.batching import OutputRows, flat_batch, output_rows
from pocketllm.engine.sampler import sampling_rows
from pocketllm.engine.scheduler import Plan
from pocketllm.engine.scoring import token_logprob
from pocketllm.runtimes.base import Runtime
from pocketllm.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token.

    Attributes:
        token_id: -1 where none could be drawn.
        logprob: how likely the model found it, where that is asked for.
    """

    token_id: int
    logprob: TokenLogprob | None = None


class Executor:
    """Runs plans on one runtime; it belongs to the engine's thread."""

    def __init__(self, runtime: Runtime, tokenizer: Tokenizer, block_size: int) -> None:
        self._runtime = runtime
        self._block_size = block_size
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Read a block back: a device that is lost refuses that too, and whatever it raises is raised."""
        self._runtime.export_blocks([0])

    def run(self, plan: Plan) -> list[Drawn]:
        """The next token of each sampled sequence of the plan, in their order; whatever the runtime raises."""
        rows = output_rows(plan)
        logits = self._runtime.forward(flat_batch(plan, rows, self._block_size)).logits
        if rows.scored:
            self._score_prompts(logits, rows)
        if not rows.drawn:
            return []
        if len(rows.drawn) < len(rows.batch_rows):
            logits = self._runtime.take_rows(logits, np.array(rows.drawn, dtype=np.int32))
        token_ids = self._runtime.sample(logits, sampling_rows(plan.sampled))
        tops = [sequence.top_logprobs for sequence in plan.sampled]
        asked = [top for top in tops if top is not None]
        if not asked:
            return [Drawn(token_id) for token_id in token_ids.tolist()]
        scores = self._runtime.score(logits, token_ids, max(asked))
        return [
            Drawn(token_id)
            if top is None or token_id < 0
            else Drawn(token_id, token_logprob(self._tokenizer, scores, row, token_id, top))
            for row, (token_id, top) in enumerate(zip(token_ids.tolist(), tops, strict=True))
        ]

    def _score_prompts(self, logits: Any, rows: OutputRows) -> None:
        """Append an entry to the sequence of every scored row."""
        targets = np.full(len(rows.batch_rows), -1, dtype=np.int32)
        for item in rows.scored:
            targets[item.row] = item.sequence.tokens[item.place]
        top = max(item.sequence.top_logprobs or 0 for item in rows.scored)
        scores = self._runtime.score(logits, targets, top)
        for item in rows.scored:
            own_top = item.sequence.top_logprobs or 0
            item.sequence.add_prompt_logprob(
                token_logprob(self._tokenizer, scores, item.row, int(targets[item.row]), own_top)
            )
