"""Causal convolution of each channel by itself, then SiLU, for a flat batch of sequences with states.

Sources: Gu and Dao, "Mamba", 2023; Yang et al., "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, NoScalars, Operand, OpSpec
from pocketllm.kernels.sigmoid_gate.spec import sigmoid


def convolved(
    weight: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    x: npt.NDArray[Any],
    state: npt.NDArray[Any],
    query_start: npt.NDArray[Any],
    state_slot: npt.NDArray[Any],
    save_slot: npt.NDArray[Any],
) -> npt.NDArray[np.float64]:
    """The convolution before SiLU, [T, C]; updates `state`."""
    past = state.shape[2]
    out = np.zeros(x.shape) if bias is None else np.tile(bias.astype(np.float64), (len(x), 1))
    for sequence, slot in enumerate(state_slot):
        start, stop = query_start[sequence : sequence + 2]
        before = state[slot].T if slot >= 0 else np.zeros((past, x.shape[1]))
        inputs = np.concatenate([before, x[start:stop]], dtype=np.float64)
        for row in range(start, stop):
            window = inputs[row - start : row - start + past + 1]
            out[row] += (window * weight.T).sum(axis=0)
            if save_slot[row] >= 0:
                state[save_slot[row]] = window[1:].T
    return out


def reference(
    s: NoScalars, *, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None, **arrays: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """``out[t] = silu(bias + sum over j of weight[:, j] * input[t - (K - 1) + j])``, K being ``past + 1``.

    Rows ``query_start[s]`` up to ``query_start[s + 1]`` of `x` belong to sequence s. The inputs before its first row
    are those in slot ``state_slot[s]`` of `state`, oldest first; where that is -1 the sequence begins here, and they
    are zero. After row t, the K - 1 latest inputs, its own included, are put into slot ``save_slot[t]``; -1 means
    nowhere. Those slots are distinct, and one that a sequence reads is written by that sequence alone, which reads it
    first. Slots that are not read may hold anything.
    """
    z = convolved(weight, bias, **arrays)
    out: npt.NDArray[Any] = (z * sigmoid(z)).astype(arrays["x"].dtype)
    return out


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """The sum of K products and a bias errs by (K + 1)u of its size, and silu has a slope of 1.1 at most.

    Silu itself is good to seven units; its result is stored and the reference rounded. States are copies, so exact.
    Where exp(-z) overflows float32 the silu underflows to zero.
    """
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    z = convolved(case.weights["weight"], case.weights.get("bias"), **arrays)
    sizes = {name: np.abs(case.arrays[name]) for name in ("x", "state")}
    weights = {name: np.abs(array) for name, array in case.weights.items()}
    size = convolved(weights["weight"], weights.get("bias"), **{**arrays, **sizes})
    taps = weights["weight"].shape[1]
    out = np.abs(z) * sigmoid(z)
    smallest = float(np.finfo(np.float32).tiny)
    return {"out": ACCUMULATION_ROUNDOFF * (1.1 * (taps + 2) * size + 7 * out) + 2 * u * out + smallest * (1 + size)}


def make_layout(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[np.int32]]:
    """A random batch over state slots: query_start, state_slot and save_slot.

    With `ragged`, sequences have from none to `new` rows; some begin, some go on; rows are saved at random, some over
    the state that their sequence read. Without, all have `new` rows and keep their state in its place.
    """
    count = dims["S"]
    if not dims["ragged"]:
        query_start = np.arange(count + 1) * dims["new"]
        state_slot = np.arange(count)
        save_slot = np.full(count * dims["new"], -1)
        save_slot[query_start[1:] - 1] = state_slot
    else:
        query_start = np.concatenate([[0], np.cumsum(rng.integers(0, dims["new"] + 1, size=count))])
        rows = int(query_start[-1])
        slots = rng.permutation(slots_of(dims))
        state_slot = np.where(rng.integers(0, 3, size=count) > 0, slots[:count], -1)
        save_slot = np.where(rng.integers(0, 2, size=rows) > 0, slots[count : count + rows], -1)
        for slot, start, stop in zip(state_slot, query_start, query_start[1:], strict=False):
            if start < stop and rng.integers(2):
                save_slot[rng.integers(start, stop)] = slot
    layout = {"query_start": query_start, "state_slot": state_slot, "save_slot": save_slot}
    return {name: array.astype(np.int32) for name, array in layout.items()}


def slots_of(dims: Dims) -> int:
    """How many state slots a batch of `make_layout` needs."""
    return dims["S"] * (1 + dims["new"] * dims["ragged"]) + 1


def make_state(
    rng: np.random.Generator, dims: Dims, shape: tuple[int, ...], state_slot: npt.NDArray[Any]
) -> npt.NDArray[np.float32]:
    """States with normal numbers in the slots that are read and NaN in all others."""
    state = np.full((slots_of(dims), *shape), np.nan, dtype=np.float32)
    for slot in state_slot[state_slot >= 0]:
        state[slot] = rng.standard_normal(shape, dtype=np.float32)
    return state


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Sequences that begin and that go on, with and without bias."""
    layout = make_layout(rng, dims)
    channels, past = dims["C"], dims["past"]
    state = make_state(rng, dims, (channels, past), layout["state_slot"])
    x = rng.standard_normal((int(layout["query_start"][-1]), channels)) * 10.0 ** rng.uniform(-3, 1)
    weights = {"weight": rng.standard_normal((channels, past + 1), dtype=np.float32)}
    if rng.integers(2):
        weights["bias"] = rng.standard_normal(channels, dtype=np.float32)
    return Case(NoScalars(), weights, {"x": x.astype(np.float32), "state": state, **layout})


def _bench(sequences: int, new: int) -> BenchShape:
    channels, past = 8192, 3
    rows = sequences * new
    return BenchShape(
        {"S": sequences, "new": new, "ragged": 0, "C": channels, "past": past},
        nbytes=4 * channels * (2 * rows + 2 * sequences * past + past + 1),
        operations=rows * channels * (2 * (past + 1) + 5),
    )


SPEC = OpSpec(
    name="causal_conv1d",
    summary="Causal convolution of each channel, then silu, going on from states and saving them at chosen rows.",
    scalars=NoScalars,
    operands=(
        Operand("weight", ("C", "past+1"), dtype="float32", role="weight"),
        Operand("bias", ("C",), dtype="float32", role="weight", optional=True),
        Operand("x", ("T", "C")),
        Operand("state", ("slots", "C", "past"), dtype="float32", role="inout"),
        Operand("query_start", ("S+1",), dtype="int32"),
        Operand("state_slot", ("S",), dtype="int32"),
        Operand("save_slot", ("T",), dtype="int32"),
        Operand("out", ("T", "C"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"S": (0, 4), "new": (1, 5), "ragged": (1, 1), "C": (1, 70), "past": (1, 4)},
    error_bound=error_bound,
    bench=(_bench(1, 1), _bench(8, 1), _bench(1, 512)),
)
