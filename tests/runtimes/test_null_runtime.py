"""The runtime of the engine's tests reads contexts back from its cache: a wrong block, place or chunk shows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.sampler import sampling_rows
from pocketllm.runtimes.base import Batch, RuntimeOptions
from pocketllm.runtimes.null_runtime import CERTAIN, NullRuntime
from pocketllm.types import SamplingParams
from tests.engine.sequences import new_sequence
from tests.scripted import ScriptedConfig

VOCAB = 32
SIZE = 4


class Contexts:
    """A script that keeps what it is shown and answers with the context's length."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, context: tuple[int, ...]) -> int:
        self.seen.append(context)
        return len(context) % VOCAB


def made(script: Contexts, blocks: int = 8) -> NullRuntime:
    options = RuntimeOptions(device="cpu", dtype="float32", block_size=SIZE)
    runtime = NullRuntime.scripted(script, ScriptedConfig(vocab_size=VOCAB), options)
    runtime.allocate(blocks, 2)
    return runtime


def batch(*parts: tuple[list[int], int, list[int]], rows: list[int] | None = None) -> Batch:
    """A step of (its tokens, the place of the first, blocks) for each sequence; logits of the last row of each."""
    widest = max(len(blocks) for _, _, blocks in parts)
    ends = np.cumsum([len(tokens) for tokens, _, _ in parts])

    def int32(values: object) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return Batch(
        token_ids=int32([token for tokens, _, _ in parts for token in tokens]),
        positions=int32([start + i for tokens, start, _ in parts for i in range(len(tokens))]),
        query_start=int32([0, *ends]),
        context_len=int32([start + len(tokens) for tokens, start, _ in parts]),
        block_table=int32([blocks + [-1] * (widest - len(blocks)) for _, _, blocks in parts]),
        state_slot=int32([0] * len(parts)),
        rope_length=int32([64] * len(parts)),
        output_rows=int32(ends - 1 if rows is None else rows),
    )


@given(st.data())
def test_contexts_are_what_was_written_however_it_was_cut(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(12)))
    sequences = [[(7 * which + place) % VOCAB for place in range(length)] for which, length in enumerate(lengths)]
    cuts = [sorted({0, length, *data.draw(st.lists(st.integers(1, length), max_size=4))}) for length in lengths]
    tables = [list(order[4 * which :][:4]) for which in range(len(lengths))]
    script = Contexts()
    runtime = made(script, blocks=12)
    spans = [list(pairwise(cut)) for cut in cuts]
    for step in range(max(map(len, spans))):
        taking = [which for which in range(len(lengths)) if step < len(spans[which])]
        parts = []
        for which in taking:
            start, end = spans[which][step]
            parts.append((sequences[which][start:end], start, tables[which]))
        script.seen.clear()
        runtime.forward(batch(*parts))
        assert script.seen == [tuple(sequences[which][: spans[which][step][1]]) for which in taking]


def test_every_row_that_is_wanted_has_its_own_context() -> None:
    script = Contexts()
    runtime = made(script)
    logits = runtime.forward(batch(([5, 6, 7], 0, [3]), ([8, 9], 0, [1]), rows=[4, 1, 2])).logits
    assert script.seen == [(8, 9), (5, 6), (5, 6, 7)]
    assert logits.argmax(axis=1).tolist() == [2, 2, 3]
    assert logits.max() == CERTAIN
    assert runtime.take_rows(logits, np.array([2, 0], dtype=np.int32)).argmax(axis=1).tolist() == [3, 2]


def test_entries_that_nobody_wrote_show() -> None:
    script = Contexts()
    made(script).forward(batch(([5], 2, [0])))
    assert script.seen == [(-1, -1, 5)]


def test_logits_of_a_script_are_taken_as_they_are() -> None:
    row = np.linspace(-1, 1, VOCAB, dtype=np.float32)
    options = RuntimeOptions(device="cpu", dtype="float32", block_size=SIZE)
    runtime = NullRuntime.scripted(lambda context: row, ScriptedConfig(vocab_size=VOCAB), options)
    runtime.allocate(2, 1)
    np.testing.assert_array_equal(runtime.forward(batch(([5], 0, [0]))).logits, row[None])


def test_tokens_are_drawn_and_scored_by_the_references() -> None:
    runtime = made(Contexts())
    logits = runtime.forward(batch(([5, 6, 7], 0, [0]), ([8], 0, [1]))).logits
    greedy = SamplingParams(temperature=0.0)
    banned = SamplingParams(temperature=0.0, logit_bias={1: -100, 9: 5})
    rows = sampling_rows([new_sequence([5, 6, 7], greedy), new_sequence([8], banned)])
    assert runtime.sample(logits, rows).tolist() == [3, 9]
    scores = runtime.score(logits, np.array([3, 4], dtype=np.int32), 2)
    assert scores.target_logit.tolist() == [CERTAIN, 0.0]
    assert scores.top_ids[:, 0].tolist() == [3, 1]
    np.testing.assert_allclose(scores.logsumexp, [CERTAIN, CERTAIN])


def test_copied_blocks_hold_the_same_and_then_go_their_own_way() -> None:
    script = Contexts()
    runtime = made(script)
    runtime.forward(batch(([1, 2, 3, 4, 5], 0, [2, 6])))
    runtime.copy_blocks([2, 6], [0, 3])
    runtime.forward(batch(([7], 5, [0, 3]), ([8], 5, [2, 6])))
    runtime.forward(batch(([9], 6, [0, 3])))
    assert script.seen[1:] == [(1, 2, 3, 4, 5, 7), (1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 5, 7, 9)]


def test_exported_blocks_come_back_in_another_place_and_another_runtime() -> None:
    first, second = Contexts(), Contexts()
    source, target = made(first), made(second)
    source.forward(batch(([1, 2, 3, 4, 5], 0, [2, 6])))
    data = source.export_blocks([2, 6])
    assert len(data) == 2 * source.bytes_per_block
    target.import_blocks([7, 1], data)
    source.forward(batch(([9] * 5, 0, [2, 6])))
    target.forward(batch(([6], 5, [7, 1])))
    assert second.seen == [(1, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize("size", [0, 12, 20, 32])
def test_contents_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"1 blocks hold 16 bytes, not {size}"):
        made(Contexts()).import_blocks([0], bytes(size))


def test_a_new_cache_forgets() -> None:
    script = Contexts()
    runtime = made(script)
    runtime.forward(batch(([1, 2, 3], 0, [0])))
    runtime.allocate(2, 1)
    runtime.forward(batch(([4], 3, [0])))
    assert script.seen[-1] == (-1, -1, -1, 4)


def test_there_are_no_states() -> None:
    runtime = made(Contexts())
    assert (runtime.bytes_per_state, runtime.snapshot(0), runtime.device_memory()) == (0, None, None)
