"""Where a batch's tokens lie in a paged cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pocketllm.runtimes.base import Batch


def cache_slots(batch: Batch, block_size: int) -> npt.NDArray[np.int64]:
    """For each token of the batch ``block * block_size + offset``, int64 [T]."""
    sequence = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
    block = batch.block_table[sequence, batch.positions // block_size].astype(np.int64)
    return block * block_size + batch.positions % block_size
