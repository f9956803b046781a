"""The ops of Gated DeltaNet: against transformers, the same bits however a sequence is cut, and broken on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, backend
from pocketllm.kernels.checking.comparison import KernelMismatchError, check, scalars_of
from pocketllm.kernels.contract import BoundOp, Case, Implementation, OpCall
from pocketllm.kernels.gated_delta_rule.impl_torch import CHUNK, CHUNKED
from pocketllm.kernels.gated_delta_rule.spec import GatedDeltaRule
from pocketllm.kernels.registry import ReferenceOpTable, implementation, spec
from tests.kernels.test_numba_bits import run_elsewhere

Array = npt.NDArray[Any]
OPS = ReferenceOpTable()
THREADS = min(2, numba.config.NUMBA_NUM_THREADS)


def normal(*shape: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def ints(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int32)


def near(actual: Array, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("biased", [False, True])
def test_convolution_of_a_prompt_and_of_what_follows(biased: bool) -> None:
    x, weight, bias = normal(9, 6), normal(6, 4, seed=8), normal(6, seed=9) if biased else None
    taps = torch.tensor(weight), None if bias is None else torch.tensor(bias)
    convolution = OPS.bind("causal_conv1d", {"weight": weight, "bias": bias})
    state = np.full((2, 6, 3), np.nan)
    out = convolution(x[:5], state, ints(0, 5), ints(-1), ints(-1, -1, -1, -1, 1))
    near(out, modeling_qwen3_5.causal_conv1d_fn(torch.tensor(x[:5]).T[None], *taps, activation="silu")[0].T)
    near(state[1], torch.tensor(x[2:5].T))
    theirs = torch.tensor(state[1:])
    out = convolution(x[5:], state, ints(0, 4), ints(1), ints(-1, -1, -1, 0))
    rest = torch.tensor(x[5:]).T[None].contiguous()
    near(out, modeling_qwen3_5.causal_conv1d_update(rest, theirs, *taps, activation="silu")[0].T)
    near(state[0], theirs[0])


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("begins", [True, False])
def test_delta_rule(rule: str, begins: bool) -> None:
    rows, s = 70, GatedDeltaRule(key_heads=2, value_heads=6, key_dim=8, value_dim=12)
    mixed, a, b = normal(rows, 2 * 2 * 8 + 6 * 12), normal(rows, 6, seed=8) * 3, normal(rows, 6, seed=9) * 3
    a_log, dt_bias, before = normal(6, seed=10), normal(6, seed=11), normal(6, 8, 12, seed=12)
    state = np.stack([np.full_like(before, np.nan), before])
    weights = {"a_log": a_log, "dt_bias": dt_bias}
    scalars = scalars_of(Case(s, {}, {}))
    save = np.full(rows, -1, dtype=np.int32)
    save[-1] = 0
    out = OPS.bind("gated_delta_rule", weights, **scalars)(
        mixed, a, b, state, ints(0, rows), ints(-1 if begins else 1), save
    )
    query, key, value = (torch.tensor(part) for part in np.split(mixed, [16, 32], axis=1))
    theirs, last = getattr(modeling_qwen3_5, rule)(
        query.view(1, rows, 2, 8),
        key.view(1, rows, 2, 8),
        value.view(1, rows, 6, 12),
        g=-torch.tensor(a_log).exp() * torch.nn.functional.softplus(torch.tensor(a + dt_bias))[None],
        beta=torch.tensor(b).sigmoid()[None],
        initial_state=None if begins else torch.tensor(before, dtype=torch.float32)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    # transformers computes in float32.
    near(out, theirs[0], tolerance=2e-5)
    near(state[0], last[0], tolerance=2e-5)


def test_gates() -> None:
    x, gate, weight = normal(3, 4, 16), normal(3, 4, 16, seed=8) * 4, normal(16, seed=9)
    norm = modeling_qwen3_5.Qwen3_5RMSNormGated(16, eps=1e-5)
    norm.weight.data = torch.tensor(weight)
    # transformers normalises in float32.
    expected = norm(torch.tensor(x), torch.tensor(gate)).detach()
    near(OPS.bind("gated_rms_norm", {"weight": weight}, eps=1e-5)(x, gate), expected, tolerance=1e-6)
    expected = torch.tensor(x) * torch.tensor(gate).sigmoid()
    OPS.bind("sigmoid_gate")(x, gate)
    near(x, expected)


@dataclass(frozen=True)
class Recurrence:
    """An op with states, bound on a backend, and random sequences to run it on."""

    name: str
    run: BoundOp
    inputs: tuple[Array, ...]
    state: tuple[int, ...]

    def steps(self, *steps: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        """Outputs of rows 0 up to the last one, and the state after each of them.

        A step is a list of sequences, as pieces of the inputs. The first sequence is the one that is looked at: its
        pieces follow each other. The others begin, in a random state of their own.
        """
        put, get = backend(self.name).put, backend(self.name).get
        rows = sum(step[0][1] - step[0][0] for step in steps)
        before = np.random.default_rng(1).standard_normal((1, *self.state)).astype(np.float32)
        state = put(np.concatenate([before, np.full((rows + 9, *self.state), np.nan, np.float32)]), "float32")
        outs, done = [], 0
        for step in steps:
            lengths = [stop - start for start, stop in step]
            inputs = [np.concatenate([array[start:stop] for start, stop in step]) for array in self.inputs]
            layout = {
                "query_start": np.concatenate([[0], np.cumsum(lengths)]),
                "state_slot": np.array([done, *[-1] * (len(step) - 1)]),
                "save_slot": np.array([*range(done + 1, done + 1 + lengths[0]), *[-1] * sum(lengths[1:])]),
            }
            arrays = [put(array, "float32") for array in inputs]
            out = self.run(*arrays, state, **{name: put(array, "int32") for name, array in layout.items()})
            outs.append(get(out)[: lengths[0]])
            done += lengths[0]
        return np.concatenate(outs), get(state)[1 : rows + 1]


def recurrence(op: str, name: str) -> Recurrence:
    """More rows and columns for Numba, whose threads share work that is worth it."""
    rows, size = (64, 3) if name == "numba" else (14, 1)
    dims = {"S": 1, "new": rows, "ragged": 0, "C": 100 * size, "past": 3}
    dims |= {"key_heads": 2, "group": 2, "key_dim": 11 * size, "value_dim": 13 * size}
    case = spec(op).make_case(np.random.default_rng(5), dims)
    put = backend(name).put
    weights = {key: put(array, "float32") for key, array in case.weights.items()}
    run = backend(name).table(FLOAT32).bind(op, weights, **scalars_of(case))
    names = ("x",) if op == "causal_conv1d" else ("mixed", "a", "b")
    return Recurrence(name, run, tuple(case.arrays[key] for key in names), case.arrays["state"].shape[1:])


@pytest.mark.parametrize("name", ["numba", "triton"])
@pytest.mark.parametrize("op", ["causal_conv1d", "gated_delta_rule"])
def test_rows_are_the_same_bits_in_any_chunk_and_beside_any_others(op: str, name: str) -> None:
    sequence = recurrence(op, name)
    rows = len(sequence.inputs[0])
    whole = sequence.steps([(0, rows)])
    assert np.isfinite(whole[1]).all()
    ways = {
        "row by row": [[(row, row + 1)] for row in range(rows)],
        "chunks": [[(0, 5)], [(5, 6)], [(6, rows)]],
        "an empty chunk": [[(0, 5)], [(5, rows), (3, 3)]],
        "beside others": [[(0, rows), (2, 9), (0, 1)]],
        "decoding beside prompts": [[(0, rows - 1), (1, 3)], [(rows - 1, rows), (0, rows)]],
    }
    for way, steps in ways.items():
        for part, expected in zip(sequence.steps(*steps), whole, strict=True):
            np.testing.assert_array_equal(part, expected, err_msg=way)


@pytest.mark.parametrize("op", ["causal_conv1d", "gated_delta_rule"])
def test_threads_change_no_bit(op: str) -> None:
    sequence = recurrence(op, "numba")
    results = []
    for threads in (1, THREADS):
        numba.set_num_threads(threads)
        results.append(sequence.steps([(0, 64), (0, 64)], [(10, 11)]))
    for one, several in zip(*results, strict=True):
        np.testing.assert_array_equal(one, several)


def digests() -> dict[str, str]:
    """Of each op, in Numba."""
    ops = backend("numba").table(FLOAT32)
    outputs = {op: recurrence(op, "numba").steps([(0, 64)])[1] for op in ("causal_conv1d", "gated_delta_rule")}
    x, gate = (normal(3, 301, seed=seed).astype(np.float32) * 5 for seed in (8, 9))
    outputs["norm"] = ops.bind("gated_rms_norm", {"weight": np.ones(301, np.float32)}, eps=1e-6)(x, gate)
    ops.bind("sigmoid_gate")(x, gate)
    outputs["gate"] = x
    return {name: hashlib.sha256(out.tobytes()).hexdigest() for name, out in outputs.items()}


@pytest.mark.parametrize(
    ("name", "features"), [("haswell", "+avx2,+fma,+f16c,+avx,+sse4.2,+ssse3"), ("generic", "")], ids=["avx2", "plain"]
)
def test_every_processor_computes_the_same_bits(name: str, features: str) -> None:
    code = "import json; from tests.kernels.test_gated_delta import digests; print(json.dumps(digests()))"
    assert run_elsewhere(code, {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}) == digests()


Change = Callable[[OpCall, dict[str, Array]], tuple[OpCall, dict[str, Array]]]
"""A call and its arrays as a broken implementation takes them; it changes copies."""


@dataclass(frozen=True)
class Broken:
    """Numba's implementation of an op, with one fault."""

    sound: Implementation
    change: Change

    def supports(self, call: OpCall) -> str | None:
        return self.sound.supports(call)

    def bind(self, call: OpCall) -> BoundOp:
        def run(**arrays: Array) -> Any:
            changed, taken = self.change(call, arrays)
            return self.sound.bind(changed)(**{name: np.ascontiguousarray(array) for name, array in taken.items()})

        return run


def weights(**changes: Callable[[Array], Array]) -> Change:
    def change(call: OpCall, arrays: dict[str, Array]) -> tuple[OpCall, dict[str, Array]]:
        changed = {
            name: np.ascontiguousarray(alter(call.weights[name]))
            for name, alter in changes.items()
            if name in call.weights
        }
        return replace(call, weights={**call.weights, **changed}), arrays

    return change


def inputs(**changes: Callable[[Array], Array]) -> Change:
    return lambda call, arrays: (call, arrays | {name: alter(arrays[name]) for name, alter in changes.items()})


def scalars(**changes: Any) -> Change:
    return lambda call, arrays: (replace(call, scalars=replace(call.scalars, **changes)), arrays)


def queries_and_keys(alter: Callable[[Array, Array], tuple[Array, Array]]) -> Change:
    """Changes both, each [T, key_heads, key_dim]; more heads than before take no further value heads each."""

    def change(call: OpCall, arrays: dict[str, Array]) -> tuple[OpCall, dict[str, Array]]:
        s, mixed = call.scalars, arrays["mixed"]
        width, rows = s.key_heads * s.key_dim, len(mixed)
        parts = (mixed[:, at : at + width].reshape(rows, s.key_heads, s.key_dim) for at in (0, width))
        query, key = alter(*parts)
        flat = [part.reshape(rows, part.shape[1] * s.key_dim) for part in (query, key)]
        changed = replace(call, scalars=replace(s, key_heads=query.shape[1]))
        return changed, arrays | {"mixed": np.concatenate([*flat, mixed[:, 2 * width :]], axis=1)}

    return change


def every_key_head_in_turn(call: OpCall, arrays: dict[str, Array]) -> tuple[OpCall, dict[str, Array]]:
    group = call.scalars.value_heads // call.scalars.key_heads
    return queries_and_keys(lambda q, k: (np.tile(q, (1, group, 1)), np.tile(k, (1, group, 1))))(call, arrays)


def squared_share(b: Array) -> Array:
    """The number whose sigmoid is the square of b's: log(p / (1 - p)) with p = sigmoid(b)^2."""
    wide = b.astype(np.float64)
    return (-np.log(np.expm1(2 * np.log1p(np.exp(-wide.clip(-300, 30)))))).astype(np.float32)


ROLLED = {"one row early": -1, "one row late": 1}
FAULTS: dict[str, tuple[str, Change]] = {
    "delta rule: no decay": ("gated_delta_rule", weights(a_log=lambda a_log: np.full_like(a_log, -100))),
    "delta rule: dt_bias ignored": ("gated_delta_rule", weights(dt_bias=np.zeros_like)),
    "delta rule: a_log in place of its exponential": (
        "gated_delta_rule",
        weights(a_log=lambda a_log: np.log(np.abs(a_log))),
    ),
    "delta rule: beta applied twice": ("gated_delta_rule", inputs(b=squared_share)),
    "delta rule: a and b swapped": ("gated_delta_rule", lambda call, x: (call, x | {"a": x["b"], "b": x["a"]})),
    "delta rule: queries and keys swapped": ("gated_delta_rule", queries_and_keys(lambda q, k: (k, q))),
    "delta rule: no eps": ("gated_delta_rule", scalars(eps=0.0)),
    "delta rule: twice the eps": ("gated_delta_rule", scalars(eps=2e-6)),
    "delta rule: wrong key head": ("gated_delta_rule", every_key_head_in_turn),
    **{
        f"{op}: saved {name}": (op, inputs(save_slot=lambda slots, shift=shift: np.roll(slots, shift)))
        for op in ("gated_delta_rule", "causal_conv1d")
        for name, shift in ROLLED.items()
    },
    **{
        f"{op}: {name}": (op, change)
        for op in ("gated_delta_rule", "causal_conv1d")
        for name, change in {
            "state of another slot": inputs(state_slot=lambda slots: np.roll(slots, 1)),
            "every sequence begins": inputs(state_slot=lambda slots: np.full_like(slots, -1)),
            "no sequence begins": inputs(state_slot=lambda slots: np.maximum(slots, 0)),
            "nothing saved": inputs(save_slot=lambda slots: np.full_like(slots, -1)),
        }.items()
    },
    "convolution: taps in reverse": ("causal_conv1d", weights(weight=lambda weight: weight[:, ::-1])),
    "convolution: no bias": ("causal_conv1d", weights(bias=np.zeros_like)),
    "convolution: inputs in bfloat16": (
        "causal_conv1d",
        inputs(x=lambda x: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)),
    ),
    "gated norm: x and gate swapped": ("gated_rms_norm", lambda call, x: (call, x | {"x": x["gate"], "gate": x["x"]})),
    "gated norm: no eps": ("gated_rms_norm", scalars(eps=1e-30)),
    "sigmoid gate: gate mirrored": ("sigmoid_gate", inputs(gate=np.negative)),
}
CASES = 40


def complaint(op: str, change: Change) -> str | None:
    """What the comparison says about the first case of `op` that is wrong after this change; None when none is."""
    contract, numba_backend = spec(op), backend("numba")
    table = numba_backend.table(FLOAT32, {op: Broken(implementation(op, "numba"), change)})
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        dims = {name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()}
        try:
            check(contract, contract.make_case(rng, dims), numba_backend, FLOAT32, table=table)
        except KernelMismatchError as error:
            return str(error)
    return None


@pytest.mark.parametrize(("op", "change"), FAULTS.values(), ids=FAULTS)
def test_a_broken_kernel_is_found(op: str, change: Change) -> None:
    assert complaint(op, change) is not None


@pytest.mark.parametrize("op", sorted({op for op, _ in FAULTS.values()}))
def test_a_sound_kernel_is_not_accused(op: str) -> None:
    assert complaint(op, inputs()) is None


@pytest.mark.parametrize("seed", range(6))
def test_prompts_in_chunks_keep_the_contract(seed: int) -> None:
    """Longer than the property tests' prompts, so that PyTorch takes them in chunks; states are saved in the middle."""
    rng = np.random.default_rng(seed)
    dims = {"S": 3, "new": int(rng.integers(CHUNKED, 3 * CHUNK)), "ragged": seed % 2}
    sizes = {"key_heads": 2, "group": 2, "key_dim": 16, "value_dim": 12}
    contract = spec("gated_delta_rule")
    check(contract, contract.make_case(rng, dims | sizes), backend("torch"), (FLOAT32, BFLOAT16)[seed % 2])
