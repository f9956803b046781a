"""Decode steps as graphs: what a step of one token a sequence queues is captured once, then queued as one.

A step's launches depend on how many sequences it has and how wide its block table is, and on nothing that the device
computes. So there is one graph for each number of sequences and each width, rounded up to a power of two. A graph reads
its step from arrays of its own and leaves its logits in one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from pocketllm.kernels.contract import Array
from pocketllm.runtimes.base import Batch
from pocketllm.runtimes.op_runtime import DeviceStep

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs what it is given, records what that queues, and returns what queues the record."""

MOST_GRAPHS = 64
"""Beyond these the ones used longest ago are dropped."""


def is_decode(batch: Batch) -> bool:
    """Whether every sequence has one row, whose logits are wanted, and nothing else is."""
    count = len(batch.context_len)
    return (
        count > 0
        and np.array_equal(batch.query_start, np.arange(count + 1))
        and np.array_equal(batch.output_rows, np.arange(count))
        and batch.hidden_rows is None
        and batch.hidden is None
    )


class DecodeGraphs:
    """The graphs of one model.

    Args:
        forward: a step's logits, in a new array.
        capture: see `Capture`.
    """

    def __init__(self, forward: Callable[[DeviceStep], Array], capture: Capture) -> None:
        self._forward = forward
        self._capture = capture
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()

    def drop(self) -> None:
        """Forget every graph: what they work on has moved."""
        self._graphs.clear()

    def run(self, step: DeviceStep) -> Array:
        """The logits of a step for which `is_decode` holds, in an array of their own."""
        count, blocks = step.block_table.shape
        key = count, 1 << (blocks - 1).bit_length()
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = _Graph(_widened(step, key[1]), self._forward, self._capture)
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph.run(step)


class _Graph:
    """One captured step."""

    def __init__(self, step: DeviceStep, forward: Callable[[DeviceStep], Array], capture: Capture) -> None:
        self._step = step
        self._logits: Array = None

        def work() -> None:
            self._logits = forward(step)

        self._launch = capture(work)

    def run(self, step: DeviceStep) -> Array:
        """Bring a step's arrays to where the graph reads them, and queue it."""
        for field in fields(step):
            given = getattr(step, field.name)
            if field.name == "block_table":
                self._step.block_table[:, : given.shape[1]] = given  # what lies behind is not read
            elif given is not None:
                getattr(self._step, field.name)[...] = given
        self._launch()
        return self._logits.copy()


def _widened(step: DeviceStep, width: int) -> DeviceStep:
    """A copy of the step, in arrays of its own, with room for `width` blocks a sequence.

    It saves no states: the step runs while it is captured too, and a state must not move on twice.
    """
    given = {field.name: getattr(step, field.name) for field in fields(step)}
    copies: dict[str, Any] = {name: array.copy() for name, array in given.items() if array is not None}
    copies["save_slots"][...] = -1
    table = copies["block_table"]
    if table.shape[1] < width:
        wide = table.repeat(width, axis=1)[:, :width].copy()
        wide[:, table.shape[1] :] = -1
        wide[:, : table.shape[1]] = table
        copies["block_table"] = wide
    return replace(step, **copies)
