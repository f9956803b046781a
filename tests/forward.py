"""Running a runtime by hand: tokens in, logits out, in whatever chunks a test likes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.kernels import bfloat16
from pocketllm.models.family import family
from pocketllm.runtimes.base import Batch, Runtime, RuntimeOptions
from pocketllm.runtimes.registry import BACKENDS

Logits = npt.NDArray[np.float32]


def load_runtime(
    path: Path, *, backend: str = "torch", device: str = "cpu", dtype: str = "float32", blocks: int = 64
) -> Runtime:
    """A loaded runtime with room for `blocks` blocks of 16 tokens."""
    with open_checkpoint(path) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        options = RuntimeOptions(device=device, dtype=dtype, block_size=16)
        runtime_class = BACKENDS[backend].load()
        assert runtime_class.supports(config, options) == ()
        runtime = runtime_class(config, options)
        runtime.load(checkpoint, lambda *_: None)
    runtime.allocate(blocks, 8)
    return runtime


def chunk_batch(pieces: Sequence[tuple[Sequence[int], int, Sequence[int]]], rope_length: int = 4096) -> Batch:
    """A batch of (new tokens, tokens already in the cache, blocks) for each sequence; logits of every row.

    The states of sequence i lie in slot i.
    """
    width = max(len(blocks) for _, _, blocks in pieces)
    starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in pieces)])

    def int32(values: Any) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    return Batch(
        token_ids=int32([token for tokens, _, _ in pieces for token in tokens]),
        positions=int32([past + i for tokens, past, _ in pieces for i in range(len(tokens))]),
        query_start=int32(starts),
        context_len=int32([past + len(tokens) for tokens, past, _ in pieces]),
        block_table=int32([[*blocks, *[-1] * (width - len(blocks))] for _, _, blocks in pieces]),
        state_slot=int32([slot if past else -1 for slot, (_, past, _) in enumerate(pieces)]),
        save_slot=int32([save for slot, (tokens, _, _) in enumerate(pieces) for save in _at_the_end(slot, tokens)]),
        rope_length=int32([rope_length] * len(pieces)),
        output_rows=int32(range(starts[-1])),
    )


def _at_the_end(slot: int, tokens: Sequence[int]) -> list[int]:
    return [*[-1] * (len(tokens) - 1), slot] if tokens else []


def as_numpy(logits: Any) -> Logits:
    """A runtime's logits in float32 on the host."""
    if hasattr(logits, "cpu"):
        return logits.float().cpu().numpy()
    host = logits.get() if hasattr(logits, "get") else logits
    return bfloat16.from_bits(host) if host.dtype == np.uint16 else np.asarray(host, dtype=np.float32)


def all_logits(runtime: Runtime, tokens: Sequence[int], chunks: Sequence[int] = (), rope_length: int = 4096) -> Logits:
    """Logits [T, vocab] of one sequence, prefilled in chunks of these sizes (the last takes the rest)."""
    blocks = list(range(-(-len(tokens) // 16)))[::-1]
    rows, past = [], 0
    for size in (*chunks, len(tokens)):
        piece = list(tokens[past : past + size])
        if piece:
            batch = chunk_batch([(piece, past, blocks)], rope_length)
            rows.append(as_numpy(runtime.forward(batch).logits))
            past += len(piece)
    return np.concatenate(rows)


def greedy(runtime: Runtime, prompt: Sequence[int], count: int) -> tuple[list[int], Logits]:
    """The next `count` tokens, each the likeliest, and the logits they were read from [count, vocab]."""
    tokens = list(prompt)
    blocks = list(range(-(-(len(tokens) + count) // 16)))
    rows, past = [], 0
    for _ in range(count):
        batch = chunk_batch([(tokens[past:], past, blocks)], len(prompt) + count)
        rows.append(as_numpy(runtime.forward(batch).logits)[-1])
        past = len(tokens)
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], np.stack(rows)
