"""Broken kernels: the comparison that the property tests use finds each of them, and finds nothing in the sound ones.

A test that cannot fail proves nothing; these say that it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.kernels.checking.arrays import FLOAT32, backend
from pocketllm.kernels.checking.comparison import KernelMismatchError, check
from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.paged_attention import impl_torch
from pocketllm.kernels.registry import BackendOpTable, implementation, spec

Fault = Callable[..., Any]
"""``fault(sound, weights, scalars, **arrays)`` calls the sound op in a wrong way, or something else."""

CASES = 60


class Faulty:
    """PyTorch's implementation of an op, broken."""

    def __init__(self, op: str, fault: Fault) -> None:
        self.op = op
        self.fault = fault

    def supports(self, call: OpCall) -> str | None:
        return implementation(self.op, "torch").supports(call)

    def bind(self, call: OpCall) -> BoundOp:
        sound = implementation(self.op, "torch").bind(call)
        contract = spec(self.op)
        names = [operand.name for operand in contract.operands_of("input", "inout")]

        def broken(*arrays: Any, **named: Any) -> Any:
            given = dict(zip(names, arrays, strict=False)) | named
            outputs = {operand.name: given.pop(operand.name, None) for operand in contract.operands_of("output")}
            result = self.fault(sound, call.weights, call.scalars, **given)
            if not outputs:
                return None
            results = result if isinstance(result, tuple) else (result,)
            written = [
                value if outputs[name] is None else outputs[name].copy_(value)
                for name, value in zip(outputs, results, strict=True)
            ]
            return written[0] if len(written) == 1 else tuple(written)

        return broken


def faulty_ops(op: str, fault: Fault) -> BackendOpTable:
    """PyTorch's ops, one of them broken; composites that have it as a part are composed."""
    return BackendOpTable("torch", device="cpu", dtype="float32", overrides={op: Faulty(op, fault)})


def complaint(op: str, table: BackendOpTable | None) -> str | None:
    """What the comparison says about the first case of `op` that fails on these ops; None when none does."""
    contract = spec(op)
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        dims = {name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()}
        try:
            check(contract, contract.make_case(rng, dims), backend("torch"), FLOAT32, table=table)
        except KernelMismatchError as error:
            return str(error)
    return None


def wrong_head(sound: BoundOp, w: Any, s: Any, q: torch.Tensor, **rest: Any) -> torch.Tensor:
    rows, heads, dim = q.shape
    kv_heads = rest["key_cache"].shape[2]
    spread = q.view(rows, heads // kv_heads, kv_heads, dim).transpose(1, 2).reshape(rows, heads, dim)
    out = sound(spread, **rest)
    return out.view(rows, kv_heads, heads // kv_heads, dim).transpose(1, 2).reshape(rows, heads, dim)


def next_block(sound: BoundOp, w: Any, s: Any, block_table: torch.Tensor, key_cache: torch.Tensor, **rest: Any) -> Any:
    return sound(block_table=(block_table + 1) % key_cache.shape[0], key_cache=key_cache, **rest)


def wider_window(sound: BoundOp, w: Any, s: Any, **arrays: Any) -> Any:
    window = s.window + 1 if s.window else 0
    ops = backend("torch").table(FLOAT32)
    return ops.bind("paged_attention", w, scale=s.scale, window=window, softcap=s.softcap)(**arrays)


def no_root(sound: BoundOp, w: Any, s: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    return x / (x.square().mean(dim=-1, keepdim=True) + s.eps) * (w["weight"] + s.weight_offset)


def constant_eps(sound: BoundOp, w: Any, s: Any, **arrays: Any) -> Any:
    ops = backend("torch").table(FLOAT32)
    return ops.bind("rms_norm", w, eps=1e-6, weight_offset=s.weight_offset)(**arrays)


def half_precision_sum(sound: BoundOp, w: Any, s: Any, x: torch.Tensor) -> torch.Tensor:
    return sound(x.to(torch.bfloat16).to(torch.float32))


def other_pairs(sound: BoundOp, w: Any, s: Any, x: torch.Tensor, angles: torch.Tensor) -> None:
    backend("torch").table(FLOAT32).bind("rotary", interleaved=not s.interleaved)(x, angles)


def exact_product(sound: BoundOp, w: Any, s: Any, positions: torch.Tensor, lengths: Any = None) -> torch.Tensor:
    if s.dynamic_factor or "divisors" in w:
        return sound(positions, lengths)
    angle = positions.to(torch.float64)[:, None] * torch.tensor(s.inverse_frequencies, dtype=torch.float64)
    return (torch.stack([angle.cos(), angle.sin()], dim=1) * s.attention_factor).to(torch.float32)


def ignores(*names: str, value: float) -> Fault:
    def fault(sound: BoundOp, w: Any, s: Any, **arrays: Any) -> Any:
        return sound(**arrays | {name: np.full_like(arrays[name], value) for name in names})

    return fault


def without(name: str) -> Fault:
    return lambda sound, w, s, **arrays: sound(**{key: array for key, array in arrays.items() if key != name})


def swapped(first: str, second: str) -> Fault:
    return lambda sound, w, s, **arrays: sound(**arrays | {first: arrays[second], second: arrays[first]})


def late_position(sound: BoundOp, w: Any, s: Any, position: Any, **rest: Any) -> Any:
    return sound(position=position ^ 1, **rest)


def without_tie_rule(sound: BoundOp, w: Any, s: Any, logits: torch.Tensor, targets: torch.Tensor) -> Any:
    flipped = logits.flip(1)
    logsumexp, target, ids, values = sound(logits, targets)
    values, ids = flipped.topk(s.k)
    ids = torch.where(values == -torch.inf, -1, logits.shape[1] - 1 - ids)
    return logsumexp, target, ids, values


FAULTS = {
    "attention: wrong head": ("paged_attention", "paged_attention", wrong_head),
    "attention: next block": ("paged_attention", "paged_attention", next_block),
    "attention: window one too wide": ("paged_attention", "paged_attention", wider_window),
    "rms_norm: no root": ("rms_norm", "rms_norm", no_root),
    "rms_norm: eps a constant": ("rms_norm", "rms_norm", constant_eps),
    "linear: inputs rounded to bfloat16": ("linear", "linear", half_precision_sum),
    "rotary: wrong pairs": ("rotary", "rotary", other_pairs),
    "rotary_angles: product not rounded": ("rotary_angles", "rotary_angles", exact_product),
    "swiglu: gate and up swapped": ("swiglu", "swiglu", swapped("gate", "up")),
    "kv_write: key and value swapped": ("kv_write", "kv_write", swapped("key", "value")),
    "score: equal logits in any order": ("score", "score", without_tie_rule),
    "sample: min_p ignored": ("sample", "sample", ignores("min_p", value=0.0)),
    "sample: top_p ignored": ("sample", "sample", ignores("top_p", value=1.0)),
    "sample: top_k ignored": ("sample", "sample", ignores("top_k", value=0)),
    "sample: presence penalty ignored": ("sample", "sample", ignores("presence_penalty", value=0.0)),
    "sample: repetition penalty ignored": ("sample", "sample", ignores("repetition_penalty", value=1.0)),
    "sample: mask ignored": ("sample", "sample", without("allowed")),
    "sample: noise of another position": ("sample", "sample", late_position),
    "decoder_layer: no second residual": ("decoder_layer", "add", lambda sound, w, s, **arrays: None),
    "decoder_layer: no first residual": ("decoder_layer", "rms_norm", without("residual")),
    "decoder_layer: wrong head": ("decoder_layer", "paged_attention", wrong_head),
    "attention_block: keys not rotated": ("attention_block", "rotary", lambda sound, w, s, **arrays: None),
    "attention_block: window one too wide": ("attention_block", "paged_attention", wider_window),
    "mlp: gate and up swapped": ("mlp", "swiglu", swapped("gate", "up")),
    "lm_head: no root": ("lm_head", "rms_norm", no_root),
}


@pytest.mark.parametrize(("op", "part", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_broken_kernel_is_found(op: str, part: str, fault: Fault) -> None:
    assert complaint(op, faulty_ops(part, fault)) is not None


@pytest.mark.parametrize("op", sorted({op for op, _, _ in FAULTS.values()}))
def test_a_sound_kernel_is_not_accused(op: str) -> None:
    assert complaint(op, None) is None


@pytest.mark.parametrize("op", ["paged_attention", "attention_block", "decoder_layer"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_off_by_one_is_found(op: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
        behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys) + shift
        return (behind >= 0) & (behind < window) if window else behind >= 0

    monkeypatch.setattr(impl_torch, "_mask", mask)
    assert complaint(op, None) is not None


def test_writing_to_an_input_is_found() -> None:
    def fault(sound: BoundOp, w: Any, s: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate, inplace=True).mul(up)

    assert "gate was written to" in (complaint("swiglu", faulty_ops("swiglu", fault)) or "")
