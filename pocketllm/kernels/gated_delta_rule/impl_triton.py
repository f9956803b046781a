"""The gated delta rule in Triton: one program holds some columns of a head's state, from a sequence's first row on.

A warp holds whole columns, so that sums over the keys' numbers need no memory that programs share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.kernels.contract import BoundOp, OpCall
from pocketllm.kernels.gated_delta_rule.spec import GatedDeltaRule
from pocketllm.kernels.numerics_triton import block_of, exp_falling, narrow, sigmoid, widen

_LARGEST = 256
"""Numbers of a key for which a state's columns fit into the registers of one warp."""


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))`` of float32 numbers, accurate where it is next to zero and where it is next to `x`.

    With ``p = exp(-|x|)``, ``log(1 + p)`` is ``2 atanh(r)`` for ``r = p / (2 + p) <= 1/3``, and the series ``r (1 +
    r^2 / 3 + r^4 / 5 + ...)`` has no terms that cancel. What is left out is 2e-9 of it.
    """
    power = exp_falling(-tl.abs(x))
    ratio = tl.div_rn(power, 2.0 + power)
    square = ratio * ratio
    series = square * (1 / 15) + 1 / 13
    for odd in tl.static_range(11, 0, -2):
        series = series * square + 1 / odd
    return tl.maximum(x, 0.0) + 2.0 * ratio * series


@triton.jit
def _unit(x, eps):
    """`x`, float32, divided by its length, which `eps` under the root keeps from being zero."""
    return x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) + eps))


@triton.jit
def _gated_delta_rule(
    mixed,
    a,
    b,
    state,
    query_start,
    state_slot,
    save_slot,
    rate,
    dt_bias,
    out,
    eps,
    scale,
    key_heads,
    value_heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (value_heads // key_heads)
    number = tl.arange(0, KEY_LANES)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, of_value = number < KEY_DIM, column < VALUE_DIM
    of_state = of_key[:, None] & of_value[None, :]
    in_slot = (head * KEY_DIM + number[:, None]) * VALUE_DIM + column[None, :]
    slot_size = value_heads * KEY_DIM * VALUE_DIM
    width = 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM
    head_rate, head_bias = tl.load(rate + head), tl.load(dt_bias + head)

    held = tl.zeros([KEY_LANES, COLUMNS], dtype=tl.float32)
    slot = tl.load(state_slot + sequence).to(tl.int64)
    if slot >= 0:
        held = tl.load(state + slot * slot_size + in_slot, mask=of_state, other=0.0)
    for row in range(tl.load(query_start + sequence), tl.load(query_start + sequence + 1)):
        wide_row = tl.cast(row, tl.int64)
        of_row = mixed + wide_row * width
        query = widen(tl.load(of_row + key_head * KEY_DIM + number, mask=of_key, other=0.0))
        key = widen(tl.load(of_row + (key_heads + key_head) * KEY_DIM + number, mask=of_key, other=0.0))
        value = of_row + 2 * key_heads * KEY_DIM + head * VALUE_DIM + column
        value = widen(tl.load(value, mask=of_value, other=0.0))
        gate = wide_row * value_heads + head
        decay = exp_falling(-head_rate * _softplus(widen(tl.load(a + gate)) + head_bias))
        beta = sigmoid(widen(tl.load(b + gate)))
        query, key = _unit(query, eps) * scale, _unit(key, eps)

        held *= decay
        correction = (value - tl.sum(held * key[:, None], axis=0)) * beta
        held += key[:, None] * correction[None, :]
        mixture = tl.sum(held * query[:, None], axis=0)
        tl.store(out + gate * VALUE_DIM + column, narrow(mixture, out.dtype.element_ty), mask=of_value)
        save = tl.load(save_slot + row).to(tl.int64)
        if save >= 0:
            tl.store(state + save * slot_size + in_slot, held, mask=of_state)


def supports(call: OpCall) -> str | None:
    """Keys whose columns of a state fit into registers."""
    size = call.scalars.key_dim
    return None if size <= _LARGEST else f"keys of {size} numbers are longer than {_LARGEST}"


def bind(call: OpCall) -> BoundOp:
    """Everything in float32 whatever the activation dtype, one rounding of the outputs at the end."""
    s: GatedDeltaRule = call.scalars
    rate = call.weights["a_log"].to(torch.float64).exp().to(torch.float32)
    dt_bias: torch.Tensor = call.weights["dt_bias"]
    columns = block_of(s.value_dim, 8)

    def gated_delta_rule(
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor,
        query_start: torch.Tensor,
        state_slot: torch.Tensor,
        save_slot: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = mixed.new_empty(len(mixed), s.value_heads, s.value_dim) if out is None else out
        _gated_delta_rule[len(state_slot), s.value_heads, triton.cdiv(s.value_dim, columns)](
            mixed,
            a,
            b,
            state,
            query_start,
            state_slot,
            save_slot,
            rate,
            dt_bias,
            out,
            s.eps,
            s.key_dim**-0.5,
            s.key_heads,
            s.value_heads,
            KEY_DIM=s.key_dim,
            VALUE_DIM=s.value_dim,
            KEY_LANES=triton.next_power_of_2(s.key_dim),
            COLUMNS=columns,
            num_warps=1,
        )
        return out

    return gated_delta_rule
