"""Decode steps as graphs: what a step of one token a sequence queues is captured once, then queued as one.

A step's launches depend on how many sequences it has and how wide its block table is, and on nothing that the device
computes. So there is one graph for each number of sequences and each width, rounded up to a power of two. A graph reads
its step from arrays of its own and leaves its logits in one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Protocol

import numpy as np

from pocketllm.kernels.contract import Array
from pocketllm.runtimes.base import Batch, IntArray
from pocketllm.runtimes.op_runtime import DeviceStep

logger = logging.getLogger(__name__)

MOST_GRAPHS = 64
"""Beyond these the ones used longest ago are dropped."""


class Recorder(Protocol):
    """What records a device's work as a graph; `pocketllm.kernels.jit.loading_cupy.DeviceStream` is one."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work`, records what it queues, and returns what queues the record; MemoryError where room is lacking.

        What a record works on is taken from memory that is kept for records.
        """

    def release_graph_memory(self) -> None:
        """Gives that memory back: no record is left."""


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
        device_step: a batch in new arrays on the device.
        forward: a step's logits, in a new array.
        recorder: see `Recorder`.
    """

    def __init__(
        self,
        device_step: Callable[[Batch], DeviceStep],
        forward: Callable[[DeviceStep], Array],
        recorder: Recorder,
    ) -> None:
        self._device_step = device_step
        self._forward = forward
        self._recorder = recorder
        self._graphs: OrderedDict[tuple[int, ...], _Graph] = OrderedDict()

    def drop(self) -> None:
        """Forget every graph, and give back the memory that they work on."""
        self._graphs.clear()
        self._recorder.release_graph_memory()

    def run(self, batch: Batch) -> Array:
        """The logits of a step for which `is_decode` holds, in an array of their own."""
        batch = replace(batch, block_table=_widened(batch.block_table))
        key = batch.block_table.shape
        graph = self._graphs.pop(key, None) or self._captured(batch)
        if graph is None:
            logger.warning("the device has no memory for another graph of a decode step: all are dropped")
            self.drop()
            return self._forward(self._device_step(batch))
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph.run(self._device_step(batch))

    def _captured(self, batch: Batch) -> _Graph | None:
        """A new graph; None where there is no memory for it."""
        # It saves no states: the step runs while it is captured too, and a state must not move on twice.
        idle = replace(batch, save_slot=np.full_like(batch.save_slot, -1))
        try:
            return _Graph(self._device_step(idle), self._forward, self._recorder)
        except MemoryError:
            return None


class _Graph:
    """One captured step, which reads its arrays anew each time."""

    def __init__(self, step: DeviceStep, forward: Callable[[DeviceStep], Array], recorder: Recorder) -> None:
        self._step = step
        self._logits: Array = None

        def work() -> None:
            self._logits = None  # what it took is there for the next run of the work
            self._logits = forward(step)

        self._launch = recorder.capture(work)

    def run(self, step: DeviceStep) -> Array:
        """Bring a step's arrays to where the graph reads them, and queue it."""
        for field in fields(step):
            given = getattr(step, field.name)
            if given is not None:
                getattr(self._step, field.name)[...] = given
        self._launch()
        return self._logits.copy()


def _widened(table: IntArray) -> IntArray:
    """The block table with a power of two of columns; what lies behind a sequence's own blocks is not read."""
    count, blocks = table.shape
    wide = np.full((count, 1 << (blocks - 1).bit_length()), -1, table.dtype)
    wide[:, :blocks] = table
    return wide
