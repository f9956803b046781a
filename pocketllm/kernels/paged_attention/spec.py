"""Causal attention over a paged cache, for a flat batch of sequences.

Sources: Vaswani et al., "Attention Is All You Need", 2017; paging: Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", 2023; grouped heads: Ainslie et al., "GQA", 2023; sinks: the gpt-oss model
card, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Scalars of the op.

    Attributes:
        scale: multiplies the products of queries and keys.
        window: how many keys a query sees at most, its own included; 0 means all.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0 means they stay.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Attended:
    """What the rows of one sequence attend to, m keys from the first visible one on.

    Attributes:
        rows: where the sequence's n rows stand in the batch.
        query: [n, heads, D].
        key: [m, heads, D], heads repeated to those of the query.
        value: [m, heads, D].
        visible: bool [n, m].
    """

    rows: slice
    query: npt.NDArray[np.float64]
    key: npt.NDArray[np.float64]
    value: npt.NDArray[np.float64]
    visible: npt.NDArray[np.bool_]


def attended(s: PagedAttention, arrays: dict[str, npt.NDArray[Any]]) -> Iterator[Attended]:
    """The sequences that have rows in this step, one after another."""
    q, table = arrays["q"], arrays["block_table"]
    block_size, kv_heads = arrays["key_cache"].shape[1:3]
    for index, context in enumerate(arrays["context_len"].tolist()):
        start, stop = arrays["query_start"][index : index + 2].tolist()
        if start == stop:
            continue
        own = np.arange(context - (stop - start), context)
        first = max(0, int(own[0]) - s.window + 1) if s.window else 0
        keys = np.arange(first, context)
        visible = keys <= own[:, None]
        if s.window:
            visible &= keys > own[:, None] - s.window
        block, offset = table[index, keys // block_size], keys % block_size
        key, value = (
            arrays[cache][block, offset].astype(np.float64).repeat(q.shape[1] // kv_heads, axis=1)
            for cache in ("key_cache", "value_cache")
        )
        yield Attended(slice(start, stop), q[start:stop].astype(np.float64), key, value, visible)


def probabilities(
    s: PagedAttention, part: Attended, sinks: npt.NDArray[Any] | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Scores and attention probabilities, both [heads, n, m]; a head's sink takes its share and gives nothing."""
    scores = np.einsum("nhd,mhd->hnm", part.query, part.key) * s.scale
    if s.softcap:
        scores = s.softcap * np.tanh(scores / s.softcap)
    scores = np.where(part.visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        mass = np.exp(scores - top)
        return scores, mass / mass.sum(axis=-1, keepdims=True)
    sink = sinks.astype(np.float64)[:, None, None]
    top = np.maximum(top, sink)
    mass = np.exp(scores - top)
    return scores, mass / (mass.sum(axis=-1, keepdims=True) + np.exp(sink - top))


def reference(
    s: PagedAttention,
    *,
    q: npt.NDArray[Any],
    sinks: npt.NDArray[Any] | None = None,
    **arrays: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """Softmax over the visible keys of the scaled, capped scores, times the values.

    Row i of a sequence's n rows stands at position ``context_len - n + i``; position p lies in the cache at block
    ``block_table[s, p // block_size]``, offset ``p % block_size``. Only entries of the block table that hold a visible
    key are read, and only slots that hold one count, whatever stands in the others (NaN too). Query head h attends with
    key and value head ``h // (heads / kv_heads)``.
    """
    out = np.zeros_like(q)
    for part in attended(s, {"q": q, **arrays}):
        _, share = probabilities(s, part, sinks)
        out[part.rows] = np.einsum("hnm,mhd->nhd", share, part.value)
    return out


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """A score errs by the sum of D products and a few operations; softmax turns twice that into a relative error.

    Exponential, running rescale, sums over m keys and the product with the values add their roundings (2m + 10, and
    the rounding of ``score - top``). Probabilities and result may be stored, and the reference is rounded.
    """
    scalars, eps = case.scalars, ACCUMULATION_ROUNDOFF
    sinks = case.weights.get("sinks")
    bound = np.zeros(case.arrays["q"].shape)
    for part in attended(scalars, case.arrays):
        scores, share = probabilities(scalars, part, sinks)
        size = np.einsum("nhd,mhd->hnm", np.abs(part.query), np.abs(part.key)) * abs(scalars.scale)
        size = np.where(part.visible, size, 0.0)
        of_score = (part.query.shape[2] + 5) * eps * size.max(axis=-1, initial=0.0, keepdims=True)
        span = 2 * size.max(axis=-1, keepdims=True)
        if sinks is not None:
            span += np.abs(sinks.astype(np.float64))[:, None, None]
        relative = np.expm1(2 * of_score + (2 * scores.shape[2] + 10 + span) * eps) + 2 * u
        gathered = np.einsum("hnm,mhd->hnd", share, np.abs(part.value))
        bound[part.rows] = (relative * gathered).transpose(1, 0, 2)
    out = reference(scalars, **case.weights, **case.arrays).astype(np.float64)
    return {"out": bound + 2 * u * np.abs(out)}


def make_layout(rng: np.random.Generator, dims: Dims) -> dict[str, npt.NDArray[Any]]:
    """Where a random batch lies in a cache: query_start, context_len, block_table and the slots of the new rows.

    With `ragged`, sequences have from 1 to `context` tokens, of which all (a prompt), one (decoding), some (a chunk) or
    none are new; without, all have `context` tokens, `new` of them new. Blocks are shuffled, and entries of the block
    table that no sequence needs are garbage.
    """
    count, size = dims["S"], dims["block_size"]
    if dims["ragged"]:
        context = rng.integers(1, dims["context"] + 1, size=count)
        some = rng.integers(0, context + 1)
        new = np.choose(rng.integers(0, 3, size=count), [context, np.ones_like(context), some])
    else:
        context = np.full(count, dims["context"])
        new = np.full(count, dims["new"])
    used = -(-context // size)
    blocks = rng.permutation(int(used.sum()) + 2)
    table = rng.choice([-1, 2**30], size=(count, int(used.max(initial=0)) + 1))
    slots: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    for index in range(count):
        table[index, : used[index]], blocks = np.split(blocks, [used[index]])
        own = np.arange(context[index] - new[index], context[index])
        slots.append(table[index, own // size] * size + own % size)
    return {
        "query_start": np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        "context_len": context.astype(np.int32),
        "block_table": table.astype(np.int32),
        "slots": np.concatenate(slots),
    }


def make_caches(
    rng: np.random.Generator, dims: Dims, layout: dict[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Caches with normal numbers where the layout's tokens lie and NaN everywhere else."""
    size = dims["block_size"]
    blocks = int((-(-layout["context_len"] // size)).sum()) + 2
    filled = np.zeros(blocks * size, dtype=bool)
    for index, context in enumerate(layout["context_len"].tolist()):
        keys = np.arange(context)
        filled[layout["block_table"][index, keys // size].astype(np.int64) * size + keys % size] = True
    caches = {}
    for name in ("key_cache", "value_cache"):
        entries = rng.standard_normal((blocks * size, dims["kv_heads"], dims["D"]), dtype=np.float32)
        entries[~filled] = np.nan
        caches[name] = entries.reshape(blocks, size, dims["kv_heads"], dims["D"])
    return caches


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A batch of prompts, chunks and decoding sequences, with and without window, cap and sinks."""
    layout = make_layout(rng, dims)
    arrays = {**make_caches(rng, dims, layout), **layout}
    del arrays["slots"]
    heads = dims["kv_heads"] * dims["group"]
    q = rng.standard_normal((int(layout["query_start"][-1]), heads, dims["D"]), dtype=np.float32)
    weights = {}
    window, softcap = 0, 0.0
    if dims["ragged"]:
        window = int(rng.choice([0, 0, 1, 3, 7]))
        softcap = float(rng.choice([0.0, 0.0, 5.0]))
        if rng.integers(3) == 0:
            weights["sinks"] = rng.standard_normal(heads, dtype=np.float32)
    scale = 2.0 / float(np.sqrt(dims["D"]))
    return Case(PagedAttention(scale, window, softcap), weights, {"q": q, **arrays})


def _bench(sequences: int, new: int, context: int) -> BenchShape:
    kv_heads, group, head_dim = 8, 4, 128
    dims = {"S": sequences, "kv_heads": kv_heads, "group": group, "D": head_dim, "block_size": 16}
    rows = sequences * new
    pairs = sequences * sum(range(context - new + 1, context + 1))
    return BenchShape(
        dims | {"context": context, "new": new, "ragged": 0},
        nbytes=4 * head_dim * kv_heads * (2 * sequences * context + 2 * rows * group),
        operations=4 * pairs * head_dim * kv_heads * group,
    )


SPEC = OpSpec(
    name="paged_attention",
    summary="Causal grouped-head attention of a batch of sequences over a paged cache.",
    scalars=PagedAttention,
    operands=(
        Operand("sinks", ("heads",), dtype="float32", role="weight", optional=True),
        Operand("q", ("T", "heads", "D")),
        Operand("key_cache", ("blocks", "block_size", "kv_heads", "D"), dtype="cache"),
        Operand("value_cache", ("blocks", "block_size", "kv_heads", "D"), dtype="cache"),
        Operand("query_start", ("S+1",), dtype="int32"),
        Operand("context_len", ("S",), dtype="int32"),
        Operand("block_table", ("S", "B"), dtype="int32"),
        Operand("out", ("T", "heads", "D"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={
        "S": (0, 4),
        "kv_heads": (1, 3),
        "group": (1, 4),
        "D": (1, 40),
        "block_size": (1, 8),
        "context": (1, 30),
        "new": (1, 1),
        "ragged": (1, 1),
    },
    error_bound=error_bound,
    bench=(_bench(1, 1, 1024), _bench(8, 1, 1024), _bench(1, 512, 512)),
)
