"""The torch runtime keeps the runtime contract: chunks, batches, blocks, scores and draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pocketllm.errors import CheckpointError
from pocketllm.models.family import PagedCache, family
from pocketllm.runtimes.base import Runtime, RuntimeOptions, SamplingRows
from pocketllm.runtimes.torch_runtime import TorchRuntime
from tests.forward import all_logits, as_numpy, chunk_batch, load_runtime
from tests.models.test_against_transformers import save_tiny

# One layer's products round differently for different batch shapes; a few units of 24 bits on logits near 10.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("qwen2")
    save_tiny("qwen2", {}, folder)
    loaded = load_runtime(folder)
    yield loaded
    loaded.close()


tokens = st.lists(st.integers(0, 319), min_size=1, max_size=60)


@given(st.lists(tokens, min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=15)
def test_mixed_chunks_of_several_sequences_give_the_logits_of_each_alone(runtime, sequences, seed) -> None:
    random = Random(seed)
    alone = [all_logits(runtime, sequence) for sequence in sequences]
    blocks = list(range(4 * len(sequences)))
    random.shuffle(blocks)
    tables = [blocks[4 * i : 4 * i + 4] for i in range(len(sequences))]
    past = [0] * len(sequences)
    rows: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(done < len(sequence) for done, sequence in zip(past, sequences, strict=True)):
        parts = []
        for i, sequence in enumerate(sequences):
            size = random.choice([0, 1, 1, 7, 40])
            if piece := sequence[past[i] : past[i] + size]:
                parts.append((i, piece))
        if not parts:
            continue
        logits = as_numpy(runtime.forward(chunk_batch([(p, past[i], tables[i]) for i, p in parts])).logits)
        start = 0
        for i, piece in parts:
            rows[i].append(logits[start : start + len(piece)])
            start += len(piece)
            past[i] += len(piece)
    for expected, found in zip(alone, rows, strict=True):
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=CLOSE)


def test_only_the_rows_asked_for_have_logits(runtime) -> None:
    batch = chunk_batch([([1, 2, 3, 4], 0, [0]), ([5, 6], 0, [1])])
    everything = as_numpy(runtime.forward(batch).logits)
    some = dataclasses.replace(batch, output_rows=np.array([5, 3], dtype=np.int32))
    np.testing.assert_allclose(as_numpy(runtime.forward(some).logits), everything[[5, 3]], rtol=0, atol=CLOSE)


def next_logits(runtime: Runtime, past: int, blocks: list[int]) -> np.ndarray:
    return as_numpy(runtime.forward(chunk_batch([([7], past, blocks)])).logits)[0]


def prefill(runtime: Runtime, blocks: list[int]) -> None:
    runtime.forward(chunk_batch([(list(range(40)), 0, blocks)]))


def test_copied_blocks_hold_the_same_entries(runtime) -> None:
    prefill(runtime, [0, 1, 2])
    expected = next_logits(runtime, 40, [0, 1, 2])
    runtime.copy_blocks([0, 1, 2], [9, 7, 5])
    prefill(runtime, [2, 0, 1])
    np.testing.assert_array_equal(next_logits(runtime, 40, [9, 7, 5]), expected)


def test_exported_blocks_come_back_wherever_they_are_imported(runtime) -> None:
    prefill(runtime, [0, 1, 2])
    expected = next_logits(runtime, 40, [0, 1, 2])
    data = runtime.export_blocks([0, 1, 2])
    assert len(data) == 3 * runtime.bytes_per_block
    runtime.allocate(64, 8)
    runtime.import_blocks([30, 11, 4], data)
    np.testing.assert_array_equal(next_logits(runtime, 40, [30, 11, 4]), expected)
    with pytest.raises(ValueError, match="2 blocks hold"):
        runtime.import_blocks([1, 2], data)


def rows_for(count: int, **values: float) -> SamplingRows:
    def full(name: str, default: float, dtype: type) -> np.ndarray:
        return np.full(count, values.get(name, default), dtype=dtype)

    return SamplingRows(
        seed=np.arange(count, dtype=np.uint64),
        position=full("position", 5, np.int32),
        temperature=full("temperature", 0.0, np.float32),
        top_p=full("top_p", 1.0, np.float32),
        min_p=full("min_p", 0.0, np.float32),
        top_k=full("top_k", 0, np.int32),
        frequency_penalty=full("frequency_penalty", 0.0, np.float32),
        presence_penalty=full("presence_penalty", 0.0, np.float32),
        repetition_penalty=full("repetition_penalty", 1.0, np.float32),
        adjust_start=np.zeros(count + 1, dtype=np.int32),
        adjust_ids=np.zeros(0, dtype=np.int32),
        adjust_bias=np.zeros(0, dtype=np.float32),
        adjust_count=np.zeros(0, dtype=np.int32),
        adjust_seen=np.zeros(0, dtype=np.bool_),
    )


def test_greedy_draws_and_scores_agree_with_the_logits(runtime) -> None:
    output = runtime.forward(chunk_batch([([3, 1, 4, 1, 5], 0, [0])]))
    logits = as_numpy(output.logits).astype(np.float64)
    ids = runtime.sample(output.logits, rows_for(5))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    scores = runtime.score(output.logits, ids, 3)
    np.testing.assert_allclose(scores.logsumexp, np.log(np.exp(logits).sum(axis=1)), rtol=1e-6)
    np.testing.assert_allclose(scores.target_logit, logits.max(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :3])


def test_draws_follow_the_distribution(runtime) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    many = torch.tensor(np.tile(logits, (4000, 1)))
    ids = runtime.sample(many, rows_for(4000, temperature=1.0))
    shares = np.bincount(ids, minlength=4) / 4000
    # Four standard deviations of a share estimated from 4000 draws.
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=4 * 0.5 / 4000**0.5)


def test_what_it_cannot_run_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = family("llama")
    config = module.parse_config("hf", module.tiny_config())
    options = RuntimeOptions(device="cpu", dtype="float32", block_size=16)
    layouts = {
        "shared between layers": {"key_cache": PagedCache((2, 8), shares=0)},
        "several tokens": {"index": PagedCache((8,), tokens_per_entry=4)},
    }
    for reason, layout in layouts.items():
        monkeypatch.setattr(module, "cache_layout", lambda config, layout=layout: (layout,))
        assert reason in TorchRuntime.supports(config, options)[0]
    monkeypatch.undo()
    assert TorchRuntime.supports(config, options) == ()
    missing = TorchRuntime.supports(config, RuntimeOptions(device="cuda:7", dtype="float32", block_size=16))
    assert "cuda:7" in missing[0]


def test_a_weight_of_another_shape_or_none_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name][:-1].clone()}, file)
    with pytest.raises(CheckpointError, match=r"up_proj.*shape \[79, 48\]"):
        load_runtime(tmp_path)
    save_file({key: value for key, value in weights.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=name):
        load_runtime(tmp_path)
