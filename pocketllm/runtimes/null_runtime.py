"""A runtime without a model: a script decides each next token. For tests of everything above the runtimes.

Its cache holds the token ids themselves, block by block, and the script is given what it reads back from there: a wrong
block table, position or chunk shows as a wrong context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.kernels.contract import BoundOp
from pocketllm.kernels.registry import ReferenceOpTable
from pocketllm.models.family import ModelConfig
from pocketllm.runtimes.base import (
    Batch,
    IntArray,
    Progress,
    Runtime,
    RuntimeOptions,
    SamplingRows,
    Scores,
    StepOutput,
)
from pocketllm.runtimes.slots import cache_slots

Script = Callable[[tuple[int, ...]], int | npt.NDArray[np.float32]]
"""From a sequence's tokens so far to the next token's id, or to a row of logits. What it raises, the step raises."""

CERTAIN = 50.0
"""Logit of the scripted token; every other token has 0."""


class NullRuntime(Runtime):
    """See `Runtime`; made for a script by `NullRuntime.scripted`."""

    name = "null"
    batch_invariant = None
    bytes_per_state = 0

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self.vocab_size = config.vocab_size
        self.bytes_per_block = 4 * options.block_size
        self._block_size = options.block_size
        self._cache: IntArray = np.zeros(0, dtype=np.int32)
        self._script: Script = lambda context: 0
        self._ops = ReferenceOpTable()
        self._sample: BoundOp = self._ops.bind("sample")

    @classmethod
    def scripted(cls, script: Script, config: ModelConfig, options: RuntimeOptions) -> NullRuntime:
        """A runtime that continues every sequence as `script` says."""
        runtime = cls(config, options)
        runtime._script = script
        return runtime

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """Every model."""
        return ()

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """There is nothing to load."""

    def allocate(self, blocks: int, states: int) -> None:
        """See `Runtime.allocate`; the cache starts out with ids that no vocabulary has."""
        self._cache = np.full(blocks * self._block_size, -1, dtype=np.int32)

    def forward(self, batch: Batch) -> StepOutput:
        """See `Runtime.forward`."""
        self._cache[cache_slots(batch, self._block_size)] = batch.token_ids
        logits = np.zeros((len(batch.output_rows), self.vocab_size), dtype=np.float32)
        for index, row in enumerate(batch.output_rows):
            answer = self._script(self._context(batch, int(row)))
            if isinstance(answer, np.ndarray):
                logits[index] = answer
            else:
                logits[index, answer] = CERTAIN
        return StepOutput(logits)

    def _context(self, batch: Batch, row: int) -> tuple[int, ...]:
        """The tokens up to `row`, as the cache holds them."""
        sequence = int(np.searchsorted(batch.query_start, row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        blocks = batch.block_table[sequence, : -(-length // self._block_size)]
        return tuple(self._cache.reshape(-1, self._block_size)[blocks].reshape(-1)[:length].tolist())

    def take_rows(self, logits: npt.NDArray[np.float32], rows: IntArray) -> npt.NDArray[np.float32]:
        """See `Runtime.take_rows`."""
        return logits[rows]

    def sample(self, logits: npt.NDArray[np.float32], rows: SamplingRows) -> IntArray:
        """See `Runtime.sample`."""
        ids: IntArray = self._sample(logits, **rows.arrays())
        return ids

    def score(self, logits: npt.NDArray[np.float32], targets: IntArray, k: int) -> Scores:
        """See `Runtime.score`."""
        return Scores(*self._ops.bind("score", k=k)(logits, targets))

    def commit(self, accepted: IntArray) -> None:
        """See `Runtime.commit`."""

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_blocks`."""
        blocks = self._cache.reshape(-1, self._block_size)
        blocks[list(target)] = blocks[list(source)]

    def snapshot(self, slot: int) -> None:
        """See `Runtime.snapshot`: there are no states."""

    def restore(self, slot: int, snapshot: None) -> None:
        """See `Runtime.restore`."""

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """See `Runtime.export_blocks`."""
        return self._cache.reshape(-1, self._block_size)[list(blocks)].tobytes()

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_blocks`."""
        values = np.frombuffer(data, dtype=np.int32)
        if values.size != len(blocks) * self._block_size:
            raise ValueError(f"{len(blocks)} blocks hold {len(blocks) * self.bytes_per_block} bytes, not {len(data)}")
        self._cache.reshape(-1, self._block_size)[list(blocks)] = values.reshape(len(blocks), -1)

    def close(self) -> None:
        """See `Runtime.close`."""
