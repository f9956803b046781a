"""The random walk: contexts over a runtime's memory, and what may happen to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.runtimes.base import Batch, Runtime, StepOutput
from tests.forward import as_numpy
from tests.runtimes.conformance.memory import Exported, Pool, Store
from tests.runtimes.conformance.models import BLOCK_SIZE, Scale
from tests.runtimes.conformance.serial import Serial

CLOSE = 1e-4
"""How far logits of a runtime without batch invariance may be from those of the serial run.

Two implementations of a model agree within 1e-3 (the tolerance of golden logits). Here one implementation cuts the same
float32 sums differently, which gets a tenth of it; what a context must not have seen moves these models' logits by far
more.
"""

EXPORTED = 8
"""How many contexts wait in the store at most."""

EVENTS = {"begin": 0.5, "fork": 0.15, "restart": 0.15, "export": 0.12, "bring_back": 0.3, "forget": 0.15, "end": 0.05}
"""What may happen before a step, in this order, and how likely each is."""


class BrokenContractError(AssertionError):
    """The runtime did what its contract rules out. Attributes: `step`, by which it had."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step = step


@dataclass(eq=False, slots=True)
class Context:
    """Tokens whose entries and states lie in the runtime: a sequence that runs, or a snapshot that is only read.

    Attributes:
        path: its tokens, and those that it will have if no draft and no fork leads elsewhere.
        rope_length: fixed when it began.
        length: how many tokens are in the cache.
        blocks: that hold them, perhaps some more.
        slot: of the states after the last of them; -1 where there are none.
        history: what happened to it.
    """

    path: tuple[int, ...]
    rope_length: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    history: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """What a sequence does in a step.

    Attributes:
        context: the sequence.
        path: its tokens with this step's; those after them do not matter.
        rows: how many of them run.
        keep: how many of those are accepted.
        marks: rows after which a snapshot is kept.
        saves: for each row the slot that gets the states after it, or -1.
    """

    context: Context
    path: tuple[int, ...]
    rows: int
    keep: int
    marks: list[int]
    saves: list[int]


class Machine:
    """A walk over one runtime. Attributes: `counts`, how often each thing happened."""

    def __init__(self, runtime: Runtime, serial: Serial, store: Store, scale: Scale, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._runtime = runtime
        self._serial = serial
        self._store = store.of(runtime)
        self._scale = scale
        self._seed = seed
        self._stateful = runtime.bytes_per_state > 0
        self._number = 0
        self._random = random = Random(f"{seed}")
        self._roots = [self._tokens(random) for _ in range(2)]
        self._sequences: list[Context] = []
        self._snapshots: list[Context] = []
        slots = scale.slots if self._stateful else 0
        runtime.allocate(scale.blocks, slots)
        self._blocks = Pool(scale.blocks, runtime.bytes_per_block, runtime.export_blocks, runtime.import_blocks)
        self._slots = Pool(slots, runtime.bytes_per_state, runtime.export_states, runtime.import_states)

    def step(self, number: int) -> None:
        """Let things happen, then run one batch. What does, `number` and the seed decide.

        Raises:
            BrokenContractError: a row differs from the serial run's.
        """
        self._number = number
        self._random = Random(f"{self._seed} {number}")
        for event, odds in EVENTS.items():
            if self._random.random() < odds:
                getattr(self, f"_{event}")()
        while not (pieces := self._plan()):
            self._make_room()
        batch = self._batch(pieces)
        output = self._runtime.forward(batch)
        self._compare(pieces, batch, output)
        for piece in pieces:
            self._commit(piece)
        self.counts["steps"] += 1

    def finish(self) -> None:
        """End every context, see that all memory came back and that what nobody owned was not written; close."""
        for context in self._sequences + self._snapshots:
            self._release(context)
        assert (self._blocks.owned, self._slots.owned) == (0, 0), "the machine itself has lost count"
        self.look_at_unowned()
        self._runtime.close()

    def look_at_unowned(self) -> None:
        """Raises BrokenContractError where memory that nobody owns was written."""
        for kind, pool in (("blocks", self._blocks), ("state slots", self._slots)):
            if written := pool.written_unowned():
                raise BrokenContractError(self._number, f"{kind} {written} were written, which nobody owned")

    # What may happen before a step.

    def _begin(self) -> None:
        if len(self._sequences) <= self._scale.sequences // 2:
            length = self._random.choice([*[self._scale.usual] * 4, self._scale.longest])
            path = self._random.choice(self._roots)[:length]
            self._sequences.append(Context(path, self._scale.longest * self._random.choice([1, 3])))
            self._happened("begin", self._sequences[-1])

    def _fork(self) -> None:
        if self._sequences:
            self._branch("fork", self._random.choice(self._sequences))

    def _restart(self) -> None:
        if self._snapshots:
            source = self._random.choice(self._snapshots)
            for _ in range(self._random.choice([1, 2])):
                self._branch("restart", source)

    def _branch(self, event: str, source: Context) -> None:
        """Another context that goes on from `source`, sharing what neither will write."""
        needed = _blocks_for(source.length)
        shared = self._shared_blocks(source)
        copied = source.blocks[shared:needed]
        if len(self._sequences) >= self._scale.sequences or len(copied) > self._blocks.free:
            return
        own = self._blocks.take(len(copied), self._random)
        self._runtime.copy_blocks(copied, own)
        self._blocks.share(source.blocks[:shared])
        branch = Context(source.path, source.rope_length, source.length, source.blocks[:shared] + own)
        if source.slot >= 0:
            branch.slot = self._other_slot(source.slot)
        branch.path = self._turned(source.path, source.length)
        branch.history = source.history[-6:]
        self._sequences.append(branch)
        self._happened(f"{event} with {shared} blocks shared, {len(copied)} copied", branch, event)

    def _shared_blocks(self, source: Context) -> int:
        """How many of its first blocks are shared: only full ones can be, since each side writes on."""
        full = source.length // BLOCK_SIZE
        return self._random.choice([full, full, self._random.randint(0, full)])

    def _other_slot(self, slot: int) -> int:
        """A copy of the slot, or the slot itself with one more owner."""
        if self._slots.free and self._random.random() < 0.3:
            (copy,) = self._slots.take(1, self._random)
            self._runtime.copy_states([slot], [copy])
            self.counts["states copied"] += 1
            return copy
        self._slots.share([slot])
        return slot

    def _export(self) -> None:
        contexts = [context for context in self._sequences + self._snapshots if context.length]
        if not contexts or len(self._store) >= EXPORTED:
            return
        context = self._random.choice(contexts)
        blocks = context.blocks[: _blocks_for(context.length)]
        states = self._runtime.export_states([context.slot]) if context.slot >= 0 else b""
        self._happened("export", context)
        exported = Exported(
            context.path,
            context.rope_length,
            context.length,
            self._runtime.export_blocks(blocks),
            states,
            tuple(context.history[-6:]),
        )
        self._store.append(exported)
        self._remove(context)

    def _bring_back(self) -> None:
        full = _blocks_for(self._scale.longest) > self._blocks.free or (self._stateful and not self._slots.free)
        if full or len(self._sequences) >= self._scale.sequences or not self._store:
            return
        exported = self._store.pop(self._random.randrange(len(self._store)))
        context = Context(exported.path, exported.rope_length, exported.length, history=list(exported.history))
        context.blocks = self._blocks.take(_blocks_for(exported.length), self._random)
        self._runtime.import_blocks(context.blocks, exported.blocks)
        if exported.states:
            (context.slot,) = self._slots.take(1, self._random)
            self._runtime.import_states([context.slot], exported.states)
        self._sequences.append(context)
        self._happened("import", context)

    def _forget(self) -> None:
        if self._snapshots:
            self._remove(self._random.choice(self._snapshots))
            self.counts["forget"] += 1

    def _end(self) -> None:
        if self._sequences:
            self._remove(self._random.choice(self._sequences))
            self.counts["end"] += 1

    def _make_room(self) -> None:
        """When nothing can run: something has to come, or to go."""
        if not self._sequences:
            self._begin()
            return
        self.counts["out of memory"] += 1
        if self._snapshots:
            self._forget()
        else:
            self._end()

    # A step.

    def _plan(self) -> list[Piece]:
        running = [context for context in self._sequences if context.length < len(context.path)]
        for context in [context for context in self._sequences if context not in running]:
            self._remove(context)
        count = min(len(running), self._random.randint(1, self._scale.together))
        pieces = (self._piece(context) for context in self._random.sample(running, count))
        return [piece for piece in pieces if piece is not None]

    def _piece(self, context: Context) -> Piece | None:
        """What the sequence does next; None when there is no memory for it."""
        kind = self._random.choice(["prefill", "prefill", "decode", "draft", "draft"])
        most = {"prefill": self._scale.chunk, "decode": 1, "draft": self._scale.drafts}[kind]
        rows = min(self._random.randint(1, most), len(context.path) - context.length)
        path = self._turned(context.path, context.length + self._random.randint(0, 2)) if kind == "draft" else None
        lacking = _blocks_for(context.length + rows) - len(context.blocks)
        # Drafts save every row; the others their last one.
        slots = (rows if kind == "draft" else 1) if self._stateful else 0
        if lacking > self._blocks.free or slots > self._slots.free:
            return None
        context.blocks += self._blocks.take(max(lacking, 0), self._random)
        keep = self._random.randint(0, rows) if kind == "draft" else rows
        marks = [row for row in range(keep) if self._random.random() < 0.3 / rows]
        marks = marks[: self._slots.free - slots] if self._stateful else marks
        saved = sorted({*(range(rows) if kind == "draft" else [rows - 1]), *marks}) if self._stateful else []
        piece = Piece(context, path or context.path, rows, keep, marks, [-1] * rows)
        for row, slot in zip(saved, self._save_into(context, len(saved), in_place=keep > 0), strict=True):
            piece.saves[row] = slot
        accepted = f", {keep} accepted" if kind == "draft" else ""
        self._happened(f"{kind} of {rows} rows{accepted}, saved into {piece.saves}", context, kind)
        self.counts["draft rows rejected"] += rows - keep
        return piece

    def _save_into(self, context: Context, count: int, *, in_place: bool) -> list[int]:
        """Distinct slots, one of them perhaps the one that the sequence reads, if it alone owns that."""
        if count and in_place and self._may_write(context.slot) and self._random.random() < 0.6:
            slots = self._slots.take(count - 1, self._random)
            slots.insert(self._random.randint(0, count - 1), context.slot)
            self._slots.share([context.slot])
            self.counts["states in place"] += 1
            return slots
        return self._slots.take(count, self._random)

    def _may_write(self, slot: int) -> bool:
        return slot >= 0 and self._slots.owners(slot) == 1

    def _batch(self, pieces: list[Piece]) -> Batch:
        """The pieces as they are, with wanted rows in any order and block tables wider than any needs."""
        ends = np.cumsum([piece.rows for piece in pieces])
        places = [range(piece.context.length, piece.context.length + piece.rows) for piece in pieces]
        used = [piece.context.blocks[: _blocks_for(place.stop)] for piece, place in zip(pieces, places, strict=True)]
        width = max(map(len, used)) + self._random.choice([0, 0, 1, 3])
        rows = range(int(ends[-1]))
        self.counts["rows"] += len(rows)
        readers = Counter(piece.context.slot for piece in pieces if piece.context.slot >= 0)
        self.counts["slots read by several"] += sum(count > 1 for count in readers.values())
        return Batch(
            token_ids=_int32(piece.path[at] for piece, place in zip(pieces, places, strict=True) for at in place),
            positions=_int32(at for place in places for at in place),
            query_start=_int32([0, *ends]),
            context_len=_int32(place.stop for place in places),
            block_table=_int32(blocks + [-1] * (width - len(blocks)) for blocks in used),
            state_slot=_int32(piece.context.slot for piece in pieces),
            save_slot=_int32(slot for piece in pieces for slot in piece.saves),
            rope_length=_int32(piece.context.rope_length for piece in pieces),
            output_rows=_int32(self._some(rows, 0.9)),
            hidden_rows=_int32(self._some(rows, 0.7)) if self._random.random() < 0.2 else None,
        )

    def _some(self, rows: range, most: float) -> list[int]:
        """Some rows in any order: mostly nearly all, sometimes one or none."""
        share = self._random.choice([0, 0.2, most, 1, 1])
        return self._random.sample(rows, round(share * len(rows)))

    def _compare(self, pieces: list[Piece], batch: Batch, output: StepOutput) -> None:
        of_row = [(piece, piece.context.length + row) for piece in pieces for row in range(piece.rows)]
        found = {"logits": (batch.output_rows, output.logits)}
        if batch.hidden_rows is not None:
            found["hidden"] = batch.hidden_rows, output.hidden
        for index, (what, (rows, values)) in enumerate(found.items()):
            values = as_numpy(values)
            assert len(values) == len(rows), f"step {self._number}: {len(values)} rows of {what}, not {len(rows)}"
            for row, value in zip(rows, values, strict=True):
                piece, position = of_row[row]
                expected = self._serial.rows(piece.path, piece.context.rope_length)[index][position]
                self._compare_row(f"{what} at position {position}", value, expected, piece.context)
            self.counts[f"rows of {what} compared"] += len(rows)

    def _compare_row(self, what: str, value: Any, expected: Any, context: Context) -> None:
        """NaN is never close to anything, and no serial run has it."""
        tolerance = 0.0 if self._runtime.batch_invariant is None else CLOSE * max(1.0, float(np.abs(expected).max()))
        error = np.abs(value.astype(np.float64) - expected).max()
        if not error <= tolerance:
            history = "\n  ".join(context.history)
            message = f"{what} are off by {error:.3g} (allowed: {tolerance:.3g}); what happened to them:\n  {history}"
            raise BrokenContractError(self._number, message)

    def _commit(self, piece: Piece) -> None:
        """Go on from the last accepted row; keep snapshots; let go of what is needed no longer."""
        context, start = piece.context, piece.context.length
        for row in piece.marks:
            length = start + row + 1
            blocks = context.blocks[: _blocks_for(length)]
            snapshot = Context(piece.path, context.rope_length, length, blocks, piece.saves[row], context.history[-6:])
            self._own(snapshot)
            self._snapshots.append(snapshot)
            self._happened(f"snapshot at {length}", snapshot, "snapshot")
        if piece.keep:
            before, context.slot = context.slot, piece.saves[piece.keep - 1]
            context.length += piece.keep
            context.path = piece.path
            self._slots.share(_real(context.slot))
            self._slots.release(_real(before))
        self._slots.release([slot for slot in piece.saves if slot >= 0])
        needed = _blocks_for(context.length)
        if self._random.random() < 0.5:
            self._blocks.release(context.blocks[needed:])
            del context.blocks[needed:]

    # Contexts and tokens.

    def _own(self, context: Context) -> None:
        self._blocks.share(context.blocks)
        self._slots.share(_real(context.slot))

    def _release(self, context: Context) -> None:
        self._blocks.release(context.blocks)
        self._slots.release(_real(context.slot))

    def _remove(self, context: Context) -> None:
        (self._sequences if context in self._sequences else self._snapshots).remove(context)
        self._release(context)

    def _happened(self, what: str, context: Context, event: str | None = None) -> None:
        self.counts[event or what] += 1
        context.history.append(f"step {self._number}, {context.length} tokens: {what}")

    def _tokens(self, random: Random) -> tuple[int, ...]:
        vocabulary = self._scale.sizes["vocab_size"]
        return tuple(random.randrange(vocabulary) for _ in range(self._scale.longest))

    def _turned(self, path: tuple[int, ...], length: int) -> tuple[int, ...]:
        """The same path, or from the first segment at or after `length` on another one."""
        start = -(-length // self._scale.segment) * self._scale.segment
        return (
            path if self._random.random() < 0.5 else path[:start] + self._random.choice(self._roots)[start : len(path)]
        )


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _real(slot: int) -> list[int]:
    return [slot] if slot >= 0 else []


def _int32(values: Any) -> npt.NDArray[np.int32]:
    return np.array(list(values), dtype=np.int32)
