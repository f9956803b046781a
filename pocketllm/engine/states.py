"""Slots of recurrent states: which one each sequence goes on from, which rows save where, which are snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pocketllm.engine.pool import Pool

NOWHERE = -1
"""In place of a slot: a sequence that begins has no states yet, and most rows save none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """States worth keeping: those after a row of the step that is the last of a block.

    Attributes:
        row: among the sequence's rows of the step.
        key: the block's.
        rolling: whether the sequence's next snapshot takes its place.
    """

    row: int
    key: bytes
    rolling: bool = False


@dataclass(slots=True)
class SequenceStates:
    """A sequence's slots.

    Attributes:
        own: the slot that nobody else reads.
        source: the slot that its next row goes on from: its own, or a snapshot.
        saves: by row of the step under way, the slot that the states after it are put into.
        rolling: the key of the snapshot that its next one takes the place of; it outlives a preemption.
        branch: after how many tokens it parts from what was computed before it, where no snapshot was found; else 0.
    """

    own: int = NOWHERE
    source: int = NOWHERE
    saves: dict[int, int] = field(default_factory=dict)
    rolling: bytes | None = None
    branch: int = 0


class StateSlots:
    """The slots of a runtime.

    A sequence owns a slot while it runs. Snapshots lie in the others, by the key of the block that they end: several
    sequences may go on from one, and none writes it. What a step has saved counts once it is committed.

    For a model without recurrent states there are no slots, and nothing here does anything.
    """

    def __init__(self, total: int) -> None:
        self.pool = Pool(total)

    @property
    def exist(self) -> bool:
        """Whether the model has recurrent states."""
        return self.pool.total > 0

    def begin(self, states: SequenceStates, snapshot: bytes | None) -> bool:
        """A slot of its own for a sequence, which goes on from a snapshot or from nothing; False when none is free."""
        if not self.exist:
            return True
        source = None if snapshot is None else self.pool.find(snapshot)
        if source is not None:
            self.pool.hold([source])  # or making room could evict it
        own = self.pool.take(1)
        if own is None:
            self.pool.release([] if source is None else [source])
            return False
        states.own = own[0]
        states.source = NOWHERE if source is None else source
        return True

    def plan(self, states: SequenceStates, rows: int, snapshots: Sequence[Snapshot]) -> None:
        """Where the rows of a step save: the last one for the sequence to go on from, and snapshots if there is room.

        Where the last row is a snapshot too, it saves there alone: going on from there costs nothing.
        """
        if not self.exist:
            return
        states.saves = {rows - 1: states.own}
        missing = [snapshot for snapshot in snapshots if self.pool.find(snapshot.key) is None]
        if missing:
            self._replace_rolling(states)  # before room is made of what others have left
        for snapshot in missing:
            taken = self.pool.take(1)
            if taken is not None:
                states.saves[snapshot.row] = taken[0]

    def plan_drafts(self, states: SequenceStates, rows: int) -> bool:
        """Where the rows of a step with drafts save: each into a slot of its own. False when so many are not free."""
        if not self.exist:
            return True
        taken = self.pool.take(rows - 1)
        if taken is None:
            return False
        # The first row is no draft: it always counts, so it may overwrite what it goes on from.
        states.saves = dict(enumerate([states.own, *taken]))
        return True

    def commit(self, states: SequenceStates, rows: int, snapshots: Sequence[Snapshot]) -> None:
        """The first `rows` rows of the step count: go on from the last of them, keep snapshots, free the rest."""
        if not self.exist:
            return
        last = states.saves[rows - 1]
        owned = {states.own, *states.saves.values()}
        self.pool.release({states.source} - {states.own, NOWHERE})
        states.source = last
        for snapshot in snapshots:
            kept = states.saves.get(snapshot.row)
            if kept is None or owned == {kept}:  # one slot must stay the sequence's own
                continue
            owned.remove(kept)
            place = self.pool.publish(kept, snapshot.key)
            self._replace_rolling(states)
            if snapshot.rolling and place == kept:  # else it is another's
                states.rolling = snapshot.key
            if kept == last:
                states.source = place
            else:
                self.pool.release([place])
        states.own = last if last in owned else min(owned)
        self.pool.release(owned - {states.own})
        states.saves = {}

    def release(self, states: SequenceStates) -> None:
        """Free every slot of a sequence; the snapshots it has left behind stay."""
        self.pool.release({states.own, states.source, *states.saves.values()} - {NOWHERE})
        states.own = states.source = NOWHERE
        states.saves = {}
        states.branch = 0

    def forget(self, key: bytes) -> None:
        """Drop a snapshot that nothing can go on from any more, if there is one."""
        self.pool.forget(key)

    def _replace_rolling(self, states: SequenceStates) -> None:
        """Drop the sequence's rolling snapshot: another comes in its place."""
        if states.rolling is not None:
            self.forget(states.rolling)
            states.rolling = None
