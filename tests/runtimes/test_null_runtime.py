"""The runtime of the engine's tests reads contexts back from its cache: a wrong block, place or chunk shows."""

from __future__ import annotations

import dataclasses
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
    """A step of (its tokens, the place of the first, blocks) for each sequence; logits of the last row of each.

    Of the blocks those count that the tokens reach.
    """
    tables = [blocks[: -(-(start + len(tokens)) // SIZE)] for tokens, start, blocks in parts]
    widest = max(map(len, tables))
    ends = np.cumsum([len(tokens) for tokens, _, _ in parts])

    def int32(values: object) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return Batch(
        token_ids=int32([token for tokens, _, _ in parts for token in tokens]),
        positions=int32([start + i for tokens, start, _ in parts for i in range(len(tokens))]),
        query_start=int32([0, *ends]),
        context_len=int32([start + len(tokens) for tokens, start, _ in parts]),
        block_table=int32([blocks + [-1] * (widest - len(blocks)) for blocks in tables]),
        state_slot=int32([-1] * len(parts)),
        save_slot=int32([-1] * ends[-1]),
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


def recurrent(states: int = 4) -> NullRuntime:
    options = RuntimeOptions(device="cpu", dtype="float32", block_size=SIZE)
    runtime = NullRuntime.scripted(Contexts(), ScriptedConfig(vocab_size=VOCAB), options, recurrent=True)
    runtime.allocate(8, states)
    return runtime


def saving(step: Batch, reads: list[int], saves: list[int]) -> Batch:
    """The step, with slots."""
    int32 = np.int32
    return dataclasses.replace(step, state_slot=np.array(reads, int32), save_slot=np.array(saves, int32))


def test_states_are_gone_on_from_wherever_they_were_saved() -> None:
    runtime = recurrent()
    runtime.forward(saving(batch(([1, 2, 3], 0, [0]), ([7], 0, [2])), [-1, -1], [-1, 2, 0, 1]))
    runtime.forward(saving(batch(([4], 3, [0]), ([8], 1, [2])), [0, 1], [0, -1]))
    runtime.forward(saving(batch(([3], 2, [0])), [2], [3]))  # from the snapshot after the second token
    runtime.forward(saving(batch(([5], 3, [0])), [3], [-1]))


def test_several_sequences_read_one_snapshot() -> None:
    runtime = recurrent()
    runtime.forward(saving(batch(([1, 2, 3, 4], 0, [0])), [-1], [-1, -1, -1, 2]))
    runtime.forward(saving(batch(([5], 4, [0, 1]), ([6], 4, [0, 2])), [2, 2], [0, 1]))


@pytest.mark.parametrize(
    ("reads", "saves", "complaint"),
    [
        ([1], [-1], "slot 1 has no states of the 3 tokens before"),  # nobody wrote it
        ([2], [-1], "slot 2 has no states"),  # it is a token old
        ([3], [-1], "slot 3 has no states"),  # it is another sequence's
        ([-1], [-1], "slot -1 has no states"),
    ],
)
def test_states_of_other_tokens_show(reads: list[int], saves: list[int], complaint: str) -> None:
    runtime = recurrent()
    runtime.forward(saving(batch(([1, 2, 3], 0, [0]), ([7, 7, 7], 0, [2])), [-1, -1], [-1, 2, 0, -1, -1, 3]))
    with pytest.raises(AssertionError, match=complaint):
        runtime.forward(saving(batch(([4], 3, [0])), reads, saves))


@pytest.mark.parametrize(
    ("reads", "saves", "complaint"),
    [
        ([0, 3], [1, 1], "written twice"),
        ([0, 3], [3, -1], "read by another sequence"),
        ([0, 0], [0, -1], "read by another sequence too"),
    ],
)
def test_slots_that_are_written_are_nobody_elses(reads: list[int], saves: list[int], complaint: str) -> None:
    runtime = recurrent()
    tokens = [1, 2, 3]
    runtime.forward(saving(batch((tokens, 0, [0]), (tokens, 0, [2])), [-1, -1], [-1, -1, 0, -1, -1, 3]))
    with pytest.raises(AssertionError, match=complaint):
        runtime.forward(saving(batch(([4], 3, [0]), ([4], 3, [2])), reads, saves))


def test_states_are_copied_and_exported() -> None:
    runtime = recurrent()
    runtime.forward(saving(batch(([1, 2, 3], 0, [0])), [-1], [-1, -1, 0]))
    runtime.copy_states([0], [2])
    data = runtime.export_states([2])
    assert len(data) == runtime.bytes_per_state > 0
    runtime.import_states([3], data)
    for slot in (2, 3):
        runtime.forward(saving(batch(([4], 3, [0])), [slot], [-1]))
    with pytest.raises(ValueError, match="2 slots hold 32 bytes, not 16"):
        runtime.import_states([0, 1], data)


def test_a_model_without_states_is_not_asked_for_any() -> None:
    for reads, saves in (([0], [-1]), ([-1], [0])):
        with pytest.raises(AssertionError, match="there are no states"):
            made(Contexts()).forward(saving(batch(([1], 0, [0])), reads, saves))


def test_there_are_no_states() -> None:
    runtime = made(Contexts())
    assert (runtime.bytes_per_state, runtime.export_states([]), runtime.device_memory()) == (0, b"", None)
