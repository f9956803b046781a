"""An engine whose runtime keeps what the engine hands it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from pocketllm.engine.engine import Engine
from pocketllm.runtimes.base import Batch, IntArray, RuntimeOptions, SamplingRows, StepOutput
from pocketllm.runtimes.null_runtime import NullRuntime, Script
from tests import scripted


class RecordingRuntime(NullRuntime):
    """A scripted runtime.

    Attributes:
        batches: every batch of `forward`, failed ones included.
        first_tokens: for each batch that did not fail, the first token of each of its sequences.
        rows: what every call of `sample` was given.
        closed: how often it was closed.
    """

    def __init__(self, config: Any, options: RuntimeOptions) -> None:
        super().__init__(config, options)
        self.batches: list[Batch] = []
        self.first_tokens: list[list[int]] = []
        self.rows: list[SamplingRows] = []
        self.closed = 0

    def forward(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        output = super().forward(batch)
        self.first_tokens.append([self._context(batch, int(row))[0] for row in batch.query_start[:-1]])
        return output

    def sample(self, logits: npt.NDArray[np.float32], rows: SamplingRows) -> IntArray:
        self.rows.append(rows)
        return super().sample(logits, rows)

    def close(self) -> None:
        self.closed += 1


@contextmanager
def recorded(script: Script, *args: Any, **kwargs: Any) -> Iterator[tuple[Engine, RecordingRuntime]]:
    """A scripted engine and its runtime; it is closed at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "NullRuntime", RecordingRuntime)
        engine = scripted.scripted_engine(script, *args, **kwargs)
    try:
        yield engine, cast(RecordingRuntime, engine._runtime)
    finally:
        engine.close()
