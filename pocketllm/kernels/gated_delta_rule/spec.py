"""The gated delta rule: linear attention whose state forgets, and corrects what it holds under a key.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.causal_conv1d.spec import make_layout, make_state
from pocketllm.kernels.contract import BenchShape, Case, Dims, Operand, OpSpec
from pocketllm.kernels.gated_delta_rule.rounding import decays, exact, rounded
from pocketllm.kernels.rms_norm.spec import make_eps
from pocketllm.kernels.sigmoid_gate.spec import sigmoid

Wide = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GatedDeltaRule:
    """Scalars of the op.

    Attributes:
        key_heads: heads of queries and of keys.
        value_heads: heads of values, states and outputs; a multiple of `key_heads`.
        key_dim: numbers of a query or key of one head.
        value_dim: numbers of a value of one head.
        eps: added to the sum of squares that queries and keys are divided by the root of.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float = 1e-6


def split(s: GatedDeltaRule, mixed: npt.NDArray[Any]) -> tuple[Wide, Wide, Wide]:
    """Queries and keys [T, value_heads, key_dim] as they came, and values [T, value_heads, value_dim], in float64."""
    width = s.key_heads * s.key_dim
    query, key, value = np.split(mixed.astype(np.float64), [width, 2 * width], axis=1)
    group = s.value_heads // s.key_heads
    return (
        query.reshape(-1, s.key_heads, s.key_dim).repeat(group, axis=1),
        key.reshape(-1, s.key_heads, s.key_dim).repeat(group, axis=1),
        value.reshape(-1, s.value_heads, s.value_dim),
    )


def unit(x: Wide, eps: float) -> Wide:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension."""
    scaled: Wide = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)
    return scaled


def reference(
    s: GatedDeltaRule,
    *,
    a_log: npt.NDArray[Any],
    dt_bias: npt.NDArray[Any],
    mixed: npt.NDArray[Any],
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    state: npt.NDArray[Any],
    query_start: npt.NDArray[Any],
    state_slot: npt.NDArray[Any],
    save_slot: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """For each row and value head, with S [key_dim, value_dim] the state before and after::

        S = S * exp(-exp(a_log) * softplus(a + dt_bias))
        S = S + outer(k, sigmoid(b) * (v - S^T k))
        out = S^T q

    A row of `mixed` holds all heads of q, then all of k, then all of v. Value head h goes with query and key head
    ``h // (value_heads / key_heads)``. k and q are divided by ``sqrt(sum of squares + eps)``, and q by
    ``sqrt(key_dim)`` too.

    Rows ``query_start[s]`` up to ``query_start[s + 1]`` belong to sequence s, which goes on from slot ``state_slot[s]``
    of `state`, or from zeros where that is -1. After row t, S is put into slot ``save_slot[t]``; -1 means nowhere.
    Those slots are distinct, and one that a sequence reads is written by that sequence alone, which reads it first.
    Slots that are not read may hold anything. Between the rows of a call S is not rounded.
    """
    query, key, value = split(s, mixed)
    query, key = unit(query, s.eps) / np.sqrt(s.key_dim), unit(key, s.eps)
    decay = np.exp(-np.exp(a_log.astype(np.float64)) * np.logaddexp(0.0, a.astype(np.float64) + dt_bias))
    beta = sigmoid(b)
    out = np.zeros(value.shape)
    for sequence, slot in enumerate(state_slot):
        held = state[slot].astype(np.float64) if slot >= 0 else np.zeros(state.shape[1:])
        for row in range(query_start[sequence], query_start[sequence + 1]):
            held = held * decay[row, :, None, None]
            error = value[row] - np.einsum("hkv,hk->hv", held, key[row])
            held = held + np.einsum("hk,hv->hkv", key[row], beta[row, :, None] * error)
            out[row] = np.einsum("hkv,hk->hv", held, query[row])
            if save_slot[row] >= 0:
                state[save_slot[row]] = held
    return out.astype(mixed.dtype)


def error_bound(case: Case, u: float) -> dict[str, Wide]:
    """The rule once more, with a bound of each operation's error; see `rounding`.

    The sum of a query's or key's n squares errs by (n + 1)u, its root by half of that, and six operations follow; a
    sigmoid is an exponential of four units and three operations. Squares that underflow vanish beside eps.
    The outputs are stored and their reference rounded; the states are float32, and only their reference is rounded.
    """
    s, weights, arrays = case.scalars, case.weights, case.arrays
    query, key, value = split(s, arrays["mixed"])
    of_unit = (s.key_dim + 1) / 2 + 6
    queries = rounded(unit(query, s.eps) / np.sqrt(s.key_dim), roundings=of_unit)
    keys, values = rounded(unit(key, s.eps), roundings=of_unit), exact(value)
    decay, beta = decays(weights["a_log"], arrays["a"], weights["dt_bias"]), rounded(sigmoid(arrays["b"]), roundings=7)
    state = arrays["state"]
    bounds = {"out": np.zeros(value.shape), "state": np.zeros(state.shape)}
    for sequence, slot in enumerate(arrays["state_slot"]):
        held = exact(state[slot] if slot >= 0 else np.zeros(state.shape[1:]))
        for row in range(arrays["query_start"][sequence], arrays["query_start"][sequence + 1]):
            held = held * decay[row, :, None, None]
            correction = beta[row, :, None] * (values[row] - held.contract(keys[row]))
            held = held + keys[row][:, :, None] * correction[:, None, :]
            out = held.contract(queries[row])
            bounds["out"][row] = out.error + 2 * u * out.size
            save = arrays["save_slot"][row]
            if save >= 0:
                bounds["state"][save] = rounded(held.value, held.error).error  # the reference's
    return bounds


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Sequences that begin and that go on; queries and keys from far below the root of eps to far above it."""
    heads = dims["key_heads"]
    s = GatedDeltaRule(heads, heads * dims["group"], dims["key_dim"], dims["value_dim"], eps=make_eps(rng))
    layout = make_layout(rng, dims)
    rows = int(layout["query_start"][-1])
    size = 10.0 ** rng.uniform(-4, 1, size=(rows, 2 * s.key_heads, 1))
    queries_and_keys = rng.standard_normal((rows, 2 * s.key_heads, s.key_dim)) * size
    values = rng.standard_normal((rows, s.value_heads * s.value_dim))
    mixed = np.concatenate([queries_and_keys.reshape(rows, 2 * s.key_heads * s.key_dim), values], axis=1)
    gates = rng.standard_normal((2, rows, s.value_heads)) * 10.0 ** rng.uniform(-1, 2, size=(2, rows, s.value_heads))
    arrays: dict[str, npt.NDArray[Any]] = {
        "mixed": mixed.astype(np.float32),
        "a": gates[0].astype(np.float32),
        "b": gates[1].astype(np.float32),
        "state": make_state(rng, dims, (s.value_heads, s.key_dim, s.value_dim), layout["state_slot"]),
        **layout,
    }
    weights = {
        "a_log": rng.uniform(-4, 2.8, size=s.value_heads).astype(np.float32),
        "dt_bias": rng.standard_normal(s.value_heads, dtype=np.float32),
    }
    return Case(s, weights, arrays)


def _bench(sequences: int, new: int) -> BenchShape:
    key_heads, group, dim = 16, 2, 128
    heads, rows = key_heads * group, sequences * new
    dims = {"S": sequences, "new": new, "ragged": 0, "key_heads": key_heads, "group": group}
    return BenchShape(
        dims | {"key_dim": dim, "value_dim": dim},
        nbytes=4 * (rows * (2 * key_heads * dim + 2 * heads * dim + 2 * heads) + 2 * sequences * heads * dim * dim),
        operations=7 * rows * heads * dim * dim,
    )


SPEC = OpSpec(
    name="gated_delta_rule",
    summary="Linear attention by the gated delta rule, going on from states and saving them at chosen rows.",
    scalars=GatedDeltaRule,
    operands=(
        Operand("a_log", ("value_heads",), dtype="float32", role="weight"),
        Operand("dt_bias", ("value_heads",), dtype="float32", role="weight"),
        Operand("mixed", ("T", "channels")),
        Operand("a", ("T", "value_heads")),
        Operand("b", ("T", "value_heads")),
        Operand("state", ("slots", "value_heads", "key_dim", "value_dim"), dtype="float32", role="inout"),
        Operand("query_start", ("S+1",), dtype="int32"),
        Operand("state_slot", ("S",), dtype="int32"),
        Operand("save_slot", ("T",), dtype="int32"),
        Operand("out", ("T", "value_heads", "value_dim"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={
        "S": (0, 4),
        "new": (1, 5),
        "ragged": (1, 1),
        "key_heads": (1, 3),
        "group": (1, 3),
        "key_dim": (1, 20),
        "value_dim": (1, 40),
    },
    error_bound=error_bound,
    bench=(_bench(1, 1), _bench(8, 1), _bench(1, 512)),
)
