"""Runtimes and engines that break the contract, each in one way: a walk that cannot fail proves nothing.

    python -m tests.runtimes.conformance.faults

prints by which step a walk catches each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pocketllm.runtimes.base import Batch, Runtime, StepOutput
from tests.runtimes.conformance.machine import Context, Machine
from tests.runtimes.conformance.memory import Store
from tests.runtimes.conformance.models import BLOCK_SIZE, SMALL, save_model
from tests.runtimes.conformance.walk import Instance, Walk

STEPS = 300
"""By which a walk has caught every fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what its walk has in place of the sound parts; see `Walk`."""

    name: str
    changes: dict[str, Any]
    model_type: str = "qwen3_5"
    backends: tuple[str, ...] = ("torch",)

    def walk(self, folder: Path) -> Walk:
        """A walk with the fault, its checkpoint in `folder`."""
        instances = [Instance(backend) for backend in self.backends]
        sound = Walk(instances=instances, folder=save_model(self.model_type, SMALL, folder), scale=SMALL)
        return replace(sound, **self.changes)


def _forward(change: Callable[[Batch], Batch]) -> dict[str, Any]:
    """Each batch is changed before the runtime sees it."""

    def apply(runtime: Runtime) -> None:
        sound = runtime.forward
        runtime.forward = lambda batch: sound(change(batch))  # type: ignore[method-assign]

    return {"change": apply}


def _save_late(batch: Batch) -> Batch:
    """States within a chunk are saved after the row that follows."""
    saves = batch.save_slot.copy()
    for start, stop in pairwise(batch.query_start):
        for row in range(start, stop - 1)[::-1]:
            if saves[row] >= 0 and saves[row + 1] < 0:
                saves[row], saves[row + 1] = -1, saves[row]
    return replace(batch, save_slot=saves)


def _restore_late(runtime: Runtime) -> None:
    """What is restored for a draft row are the states after the row that follows."""
    sound = runtime.forward

    def forward(batch: Batch) -> StepOutput:
        output = sound(batch)
        for start, stop in pairwise(batch.query_start):
            for own, late in pairwise(batch.save_slot[start:stop].tolist()):
                if own >= 0 and late >= 0:
                    runtime.copy_states([late], [own])
        return output

    runtime.forward = forward  # type: ignore[method-assign]


def _begin_from_a_slot(batch: Batch) -> Batch:
    """A sequence that begins finds what its slot was left with, not zeros."""
    first_saves = [max(batch.save_slot[start:stop]) for start, stop in pairwise(batch.query_start)]
    return replace(batch, state_slot=np.where(batch.state_slot < 0, first_saves, batch.state_slot).astype(np.int32))


def _save_into_the_last(batch: Batch) -> Batch:
    """-1 counts from the end, as Python's indices do."""
    saves = batch.save_slot.copy()
    unsaved = np.flatnonzero(saves < 0)
    if len(unsaved) and SMALL.slots - 1 not in [*saves, *batch.state_slot]:
        saves[unsaved[-1]] = SMALL.slots - 1
    return replace(batch, save_slot=saves)


def _next_block(batch: Batch) -> Batch:
    """Tokens lie one block further on in the table."""
    table = batch.block_table.copy()
    for blocks, length in zip(table, batch.context_len, strict=True):
        used = -(-length // BLOCK_SIZE)
        blocks[:used] = np.roll(blocks[:used], -1)
    return replace(batch, block_table=table)


def _rows_in_order(batch: Batch) -> Batch:
    """Wanted rows come in ascending order, not in the order asked for."""
    return replace(batch, output_rows=np.sort(batch.output_rows))


def _one_rope_length(batch: Batch) -> Batch:
    """The first sequence's rotary length is taken for all."""
    return replace(batch, rope_length=np.full_like(batch.rope_length, batch.rope_length[0]))


def _export_sorted(runtime: Runtime) -> None:
    """Blocks are exported in the order of their numbers, not in the order asked for."""
    sound = runtime.export_blocks
    runtime.export_blocks = lambda blocks: sound(sorted(blocks))  # type: ignore[method-assign]


def _copy_one_less(runtime: Runtime) -> None:
    """The last of several blocks is not copied."""
    sound = runtime.copy_blocks

    def copy_blocks(source: Sequence[int], target: Sequence[int]) -> None:
        keep = max(1, len(source) - 1) if source else 0
        sound(source[:keep], target[:keep])

    runtime.copy_blocks = copy_blocks  # type: ignore[method-assign]


def _round_differently_beside_others(runtime: Runtime) -> None:
    """In a batch of several rows a logit is one unit in the last place higher."""
    sound = runtime.forward

    def forward(batch: Batch) -> StepOutput:
        output = sound(batch)
        if len(batch.token_ids) > 1 and len(output.logits):
            output.logits[0, 0] = np.nextafter(output.logits[0, 0], np.float32(np.inf))
        return output

    runtime.forward = forward  # type: ignore[method-assign]


class SharesPartialBlock(Machine):
    """A branch shares its source's last block although both write on in it."""

    def _shared_blocks(self, source: Context) -> int:
        return -(-source.length // BLOCK_SIZE)


class WritesSharedSlot(Machine):
    """A sequence saves into the slot that it reads although others go on from there."""

    def _may_write(self, slot: int) -> bool:
        return slot >= 0


FAULTS = (
    Fault("states are restored one row late", {"change": _restore_late}),
    Fault("states are saved one row late", _forward(_save_late)),
    Fault("a block is shared after a write", {"machine": SharesPartialBlock}, "llama"),
    Fault("a key lacks the numerics id", {"store": partial(Store, lambda runtime: "")}, "llama", ("numba", "torch")),
    Fault("a slot that others read is written", {"machine": WritesSharedSlot}),
    Fault("a sequence begins from a slot's old states", _forward(_begin_from_a_slot)),
    Fault("states that go nowhere go to the last slot", _forward(_save_into_the_last)),
    Fault("block tables are read one block off", _forward(_next_block), "llama"),
    Fault("wanted rows come in ascending order", _forward(_rows_in_order), "llama"),
    Fault("one rotary length holds for all", _forward(_one_rope_length), "llama"),
    Fault("blocks are exported in ascending order", {"change": _export_sorted}, "llama"),
    Fault("the last of several blocks is not copied", {"change": _copy_one_less}, "llama"),
    Fault("company changes the last bit", {"change": _round_differently_beside_others}, "llama", ("numba",)),
)


def _main() -> None:
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            failure = fault.walk(Path(folder)).failure(range(STEPS))
        print(f"{fault.name}: {'not caught' if failure is None else f'caught by step {failure.step}'}", flush=True)


if __name__ == "__main__":
    _main()
