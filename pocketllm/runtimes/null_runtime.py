"""A runtime without a model: a script decides each next token. For tests of everything above the runtimes.

Its cache holds the token ids themselves, block by block, and the script is given what it reads back from there: a wrong
block table, position or chunk shows as a wrong context. It can also have recurrent states: a running hash of the tokens
seen and their number, which every step compares with what the cache says, so a wrong, stale or missing state shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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

StateArray = npt.NDArray[np.int64]

CERTAIN = 50.0
"""Logit of the scripted token; every other token has 0."""


STATE_NUMBERS = 2
"""Of a state: the hash of the tokens seen, and how many they are."""


def _next_state(state: tuple[int, int], token_ids: Iterable[int]) -> tuple[int, int]:
    """The state after some more tokens."""
    value, count = state
    for token in token_ids:
        value, count = (value * 1_000_003 + token + 1) % (2**61 - 1), count + 1
    return value, count


class NullRuntime(Runtime):
    """See `Runtime`; made for a script by `NullRuntime.scripted`."""

    name = "null"
    batch_invariant = None

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self.vocab_size = config.vocab_size
        self.bytes_per_block = 4 * options.block_size
        self.bytes_per_state = 0
        self._block_size = options.block_size
        self._cache: IntArray = np.zeros(0, dtype=np.int32)
        self._states: StateArray = np.zeros((0, STATE_NUMBERS), dtype=np.int64)
        self._script: Script = lambda context: 0
        self._ops = ReferenceOpTable()
        self._sample: BoundOp = self._ops.bind("sample")

    @classmethod
    def scripted(
        cls, script: Script, config: ModelConfig, options: RuntimeOptions, *, recurrent: bool = False
    ) -> NullRuntime:
        """A runtime that continues every sequence as `script` says; with recurrent states if that is asked for."""
        runtime = cls(config, options)
        runtime._script = script
        if recurrent:
            runtime.bytes_per_state = STATE_NUMBERS * runtime._states.itemsize
        return runtime

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """Every model."""
        return ()

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """There is nothing to load."""

    @property
    def numerics_id(self) -> str:
        """See `Runtime.numerics_id`."""
        return f"null, blocks of {self._block_size}"

    def allocate(self, blocks: int, states: int) -> None:
        """See `Runtime.allocate`; the cache starts out with ids that no vocabulary has, and with impossible states."""
        self._cache = np.full(blocks * self._block_size, -1, dtype=np.int32)
        self._states = np.full((states, STATE_NUMBERS), -1, dtype=np.int64)

    def forward(self, batch: Batch) -> StepOutput:
        """See `Runtime.forward`; AssertionError when the batch breaks the contract, or reads wrong states."""
        needed = -(-batch.context_len // self._block_size)
        assert ((batch.block_table >= 0).sum(axis=1) == needed).all(), "blocks are missing, or too many"
        assert batch.block_table.shape[1] == needed.max(), "columns that no sequence needs"
        self._cache[cache_slots(batch, self._block_size)] = batch.token_ids
        if self.bytes_per_state:
            self._advance_states(batch)
        else:
            assert (batch.state_slot == -1).all(), "there are no states to go on from"
            assert (batch.save_slot == -1).all(), "there are no states to save"
        logits = np.zeros((len(batch.output_rows), self.vocab_size), dtype=np.float32)
        for index, row in enumerate(batch.output_rows):
            answer = self._script(self._context(batch, int(row)))
            if isinstance(answer, np.ndarray):
                logits[index] = answer
            else:
                logits[index, answer] = CERTAIN
        return StepOutput(logits)

    def _advance_states(self, batch: Batch) -> None:
        """Go on from the sequences' states, which must be those of their contexts, and save what is asked for."""
        saved: dict[int, tuple[int, int]] = {}
        reading = batch.state_slot.tolist()
        for sequence, slot in enumerate(reading):
            first, end = batch.query_start[sequence : sequence + 2].tolist()
            state = (0, 0) if slot == -1 else tuple(self._states[slot].tolist())
            before = self._context(batch, first)[:-1]
            assert state == _next_state((0, 0), before), f"slot {slot} has no states of the {len(before)} tokens before"
            for row in range(first, end):
                state = _next_state(state, [int(batch.token_ids[row])])
                target = int(batch.save_slot[row])
                if target == -1:
                    continue
                assert target not in saved, f"slot {target} is written twice"
                assert target == slot or target not in reading, f"slot {target} is read by another sequence"
                assert reading.count(target) < 2, f"slot {target} is read by another sequence too"
                saved[target] = state
        for slot, state in saved.items():
            self._states[slot] = state

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

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_blocks`."""
        blocks = self._cache.reshape(-1, self._block_size)
        blocks[list(target)] = blocks[list(source)]

    def copy_states(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_states`."""
        self._states[list(target)] = self._states[list(source)]

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """See `Runtime.export_blocks`."""
        return self._cache.reshape(-1, self._block_size)[list(blocks)].tobytes()

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_blocks`."""
        values = np.frombuffer(data, dtype=np.int32)
        if values.size != len(blocks) * self._block_size:
            raise ValueError(f"{len(blocks)} blocks hold {len(blocks) * self.bytes_per_block} bytes, not {len(data)}")
        self._cache.reshape(-1, self._block_size)[list(blocks)] = values.reshape(len(blocks), -1)

    def export_states(self, slots: Sequence[int]) -> bytes:
        """See `Runtime.export_states`."""
        return self._states[list(slots)].tobytes() if self.bytes_per_state else b""

    def import_states(self, slots: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_states`."""
        if len(data) != len(slots) * self.bytes_per_state:
            raise ValueError(f"{len(slots)} slots hold {len(slots) * self.bytes_per_state} bytes, not {len(data)}")
        if self.bytes_per_state:
            self._states[list(slots)] = np.frombuffer(data, dtype=np.int64).reshape(len(slots), -1)

    def close(self) -> None:
        """See `Runtime.close`."""
