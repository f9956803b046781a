"""The causal convolution in Numba: some channels of a sequence at a time, from its first row to its last."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange, types

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, device, readonly
from pocketllm.kernels.output_numba import padded_bias, store_outputs
from pocketllm.kernels.simd_numba import LANES, broadcast, fma, load_f32, mul, sigmoid, store_f32

TILE = 8 * LANES
"""Channels whose latest inputs a thread keeps."""

ALONE = 1 << 14
"""Numbers below which a second thread costs more than it saves."""


def supports(call: OpCall) -> str | None:
    """Every call is served."""
    return None


def bind(call: OpCall) -> BoundOp:
    """Weights tap by tap, padded to whole vectors of channels."""
    channels, taps = call.weights["weight"].shape
    groups = -(-channels // LANES)
    weight = np.zeros((taps, groups * LANES), dtype=np.float32)
    weight[:, :channels] = call.weights["weight"].T
    bias = padded_bias(call.weights.get("bias"), groups)
    kernel = KERNEL.request()

    def causal_conv1d(
        x: npt.NDArray[Any],
        state: npt.NDArray[Any],
        query_start: npt.NDArray[Any],
        state_slot: npt.NDArray[Any],
        save_slot: npt.NDArray[Any],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        out = np.empty_like(x) if out is None else out
        kernel(x, state, query_start, state_slot, save_slot, weight, bias, out)
        return out

    return causal_conv1d


def _causal_conv1d(
    x: Any, state: Any, query_start: Any, state_slot: Any, save_slot: Any, weight: Any, bias: Any, out: Any
) -> None:
    tiles = (x.shape[1] + TILE - 1) // TILE
    batch = query_start, state_slot, save_slot
    if x.size < ALONE:
        for item in range(len(state_slot) * tiles):
            sequence, tile = divmod(item, tiles)
            convolve_tile(x, state, batch, weight, bias, sequence, tile * TILE, out)
    else:
        for item in prange(len(state_slot) * tiles):
            sequence, tile = divmod(np.int64(item), tiles)
            convolve_tile(x, state, batch, weight, bias, sequence, tile * TILE, out)


@device
def convolve_tile(x: Any, state: Any, batch: Any, weight: Any, bias: Any, sequence: Any, first: Any, out: Any) -> None:
    """The channels from `first` on of one sequence; `batch` is query_start, state_slot and save_slot."""
    query_start, state_slot, save_slot = batch
    taps, width = len(weight), min(TILE, x.shape[1] - first)
    # The inputs that a row sees, oldest first, its own in the last place; lanes without a channel stay zero.
    window = np.zeros((taps, TILE), np.float32)
    slot = state_slot[sequence]
    if slot >= 0:
        for channel in range(width):
            for tap in range(taps - 1):
                window[tap, channel] = state[slot, first + channel, tap]
    for row in range(query_start[sequence], query_start[sequence + 1]):
        for channel in range(width):
            window[taps - 1, channel] = x[row, first + channel]
        for group in range((width + LANES - 1) // LANES):
            _convolve_group(window, weight, bias, row, group, first, out)
        save = save_slot[row]
        if save >= 0:
            for channel in range(width):
                for tap in range(taps - 1):
                    state[save, first + channel, tap] = window[tap, channel]


@device
def _convolve_group(window: Any, weight: Any, bias: Any, row: Any, group: Any, first: Any, out: Any) -> None:
    """Eight channels of one row; their inputs move on by one place."""
    channel = first + group * LANES
    total = load_f32(bias, channel)
    for tap in range(len(weight)):
        at = tap * TILE + group * LANES
        value = load_f32(window, at)
        total = fma(load_f32(weight, tap * weight.shape[1] + channel), value, total)
        if tap > 0:
            store_f32(window, at - TILE, value)
    store_outputs(out, row, channel // LANES, mul(total, sigmoid(total, broadcast(np.float32(1.0)))))


_INTS = readonly(types.int32, 1)
KERNEL = Kernel(
    _causal_conv1d,
    readonly(types.float32, 2),
    array(types.float32, 3),
    _INTS,
    _INTS,
    _INTS,
    readonly(types.float32, 2),
    readonly(types.float32, 1),
    array(types.float32, 2),
    parallel=True,
)
