"""Eight outputs of a row at a time, in Numba kernels of products; the last group of a weight may hold fewer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.jit.toolchain_numba import device
from pocketllm.kernels.simd_numba import LANES, lane, store_f32


def padded_bias(bias: npt.NDArray[Any] | None, groups: int) -> npt.NDArray[np.float32]:
    """A bias for that many groups of outputs; zeros where there is none and beyond its end."""
    padded = np.zeros(groups * LANES, dtype=np.float32)
    if bias is not None:
        padded[: len(bias)] = bias
    return padded


@device
def store_outputs(out: Any, row: Any, group: Any, vector: Any) -> None:
    """Puts outputs 8 group to 8 group + 7 of a row, as far as there are any, into out [T, N]."""
    outputs = out.shape[1]
    first = group * LANES
    if first + LANES <= outputs:
        store_f32(out, row * outputs + first, vector)
    else:
        for index in range(outputs - first):
            out[row, first + index] = lane(vector, index)
