"""What a runtime says of tokens that run alone: the whole path as one prefill, in an instance of its own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.runtimes.base import Batch, Runtime
from tests.forward import as_numpy
from tests.runtimes.conformance.models import BLOCK_SIZE

KEPT = 400
"""Paths whose rows are kept: long walks have many thousands, most of which never come back."""

Rows = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class Serial:
    """Logits [T, vocab] and hidden rows [T, hidden] by path and rotary length."""

    def __init__(self, runtime: Runtime, longest: int) -> None:
        self._runtime = runtime
        self._blocks = -(-longest // BLOCK_SIZE)
        self._kept: OrderedDict[tuple[tuple[int, ...], int], Rows] = OrderedDict()
        runtime.allocate(self._blocks, 1 if runtime.bytes_per_state else 0)

    def rows(self, path: tuple[int, ...], rope_length: int) -> Rows:
        """Of every token of the path."""
        key = path, rope_length
        if key not in self._kept:
            output = self._runtime.forward(self._alone(path, rope_length))
            self._kept[key] = as_numpy(output.logits), as_numpy(output.hidden)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def close(self) -> None:
        """Give the runtime back."""
        self._runtime.close()

    def _alone(self, path: tuple[int, ...], rope_length: int) -> Batch:
        def int32(values: Any) -> npt.NDArray[np.int32]:
            return np.array(values, dtype=np.int32)

        count = len(path)
        return Batch(
            token_ids=int32(path),
            positions=int32(range(count)),
            query_start=int32([0, count]),
            context_len=int32([count]),
            block_table=int32([range(self._blocks)]),
            state_slot=int32([-1]),
            save_slot=int32([-1] * count),
            rope_length=int32([rope_length]),
            output_rows=int32(range(count)),
            hidden_rows=int32(range(count)),
        )
