"""Recurrent states: where a sequence goes on, which snapshots it leaves, and what drafts do to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.cached import SIZE, Bench
from tests.engine.sequences import new_sequence
from tests.engine.test_cache_hits import found, left_behind

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def snapshots(bench: Bench, tokens: list[int]) -> list[int]:
    """After how many of the tokens the cache has a snapshot."""
    assert bench.cache.keys is not None
    chain = bench.cache.keys.chain(bench.cache.keys.root(0), tokens, SIZE)
    return [SIZE * (place + 1) for place, key in enumerate(chain) if bench.cache.states.pool.find(key) is not None]


def in_chunks(bench: Bench, tokens: list[int], *chunks: int) -> list[list[int]]:
    """Compute a prompt chunk by chunk; after how many tokens it has snapshots then."""
    sequence = new_sequence(tokens)
    assert bench.admit(sequence)
    left = []
    for rows in chunks:
        bench.step((sequence, rows))
        bench.check()
        left.append(snapshots(bench, tokens))
    bench.end(sequence)
    return left


def test_each_chunk_leaves_a_snapshot_at_its_last_block_end_in_place_of_the_one_before() -> None:
    left = in_chunks(Bench(50, states=8), [1] * 62, 10, 3, 2, 15, 12, 12, 8)
    assert left == [[8], [8, 12], [8, 12], [8, 28], [8, 28, 40], [8, 28, 40, 52], [8, 28, 40, 60]]


def test_a_long_prompt_leaves_one_behind_each_power_of_two_and_its_last() -> None:
    assert in_chunks(Bench(200, states=40), [1] * 301, *[12] * 25, 1)[-1] == [12, 24, 36, 72, 132, 264, 300]


@pytest.mark.parametrize(("chunk", "left"), [(8, [8, 16, 32, 64, 128, 256, 296]), (11, [8, 20, 32, 64, 132, 264, 296])])
def test_a_long_prompt_takes_no_snapshots_of_others(chunk: int, left: list[int]) -> None:
    bench = Bench(200, states=12)
    for tail in (2, 3):
        left_behind(bench, [*[1] * 9, *[tail] * 3])
    assert snapshots(bench, [1] * 9) == [8]
    tokens = [5] * 300
    assert in_chunks(bench, tokens, *[chunk] * (300 // chunk), *([300 % chunk] if 300 % chunk else []))[-1] == left
    assert snapshots(bench, [1] * 9) == [8]


def test_a_sequence_gives_up_its_own_snapshot_before_it_takes_anothers() -> None:
    bench = Bench(50, states=4)
    left_behind(bench, PROMPT)
    assert in_chunks(bench, [2] * 30, 9, 4, 5, 4) == [[8], [8, 12], [8, 16], [8, 16, 20]]
    bench = Bench(50, states=3)
    left_behind(bench, PROMPT)
    sequence = new_sequence([2] * 7)
    bench.prefill(sequence)
    assert snapshots(bench, sequence.tokens) == [4]
    bench.decode(sequence, 3, 3, 3)
    assert snapshots(bench, sequence.tokens) == [4, 8]
    assert found_nothing(bench, PROMPT)
    left_behind_free = bench.cache.states.pool.free
    bench.decode(sequence, *range(20, 28))
    assert snapshots(bench, sequence.tokens) == [4, 16]
    assert bench.cache.states.pool.free == left_behind_free


def test_a_prompt_of_whole_blocks_leaves_one_that_itself_can_use() -> None:
    bench = Bench(50, states=8)
    left_behind(bench, [1] * 12)
    assert snapshots(bench, [1] * 12) == [8]
    assert found(bench, [1] * 12) == 8


def test_a_hit_ends_at_the_last_snapshot() -> None:
    bench = Bench(50, states=8)
    left_behind(bench, PROMPT)
    assert found(bench, PROMPT) == 8
    assert found(bench, [*PROMPT, 12]) == 8
    assert found(bench, [*PROMPT[:7], 70]) == 0  # its first block is there, and no states at the end of it


def test_where_prompts_part_the_second_leaves_a_snapshot() -> None:
    bench = Bench(50, states=8)
    shared = [1] * 13
    left_behind(bench, [*shared, *[2] * 11])
    assert snapshots(bench, shared) == []
    left_behind(bench, [*shared, *[3] * 11])
    assert snapshots(bench, [*shared, *[3] * 11]) == [12, 20]
    assert found(bench, [*shared, *[4] * 11]) == 12


def test_a_sequence_goes_on_from_a_snapshot_that_others_read_as_well() -> None:
    bench = Bench(50, states=8)
    left_behind(bench, PROMPT)
    first, second = new_sequence([*PROMPT, 12]), new_sequence([*PROMPT, 13, 14])
    assert bench.admit(first)
    assert bench.admit(second)
    assert first.states.source == second.states.source
    bench.step((first, 4), (second, 5))
    bench.check()
    assert found(bench, PROMPT) == 8


def test_a_snapshot_at_the_last_row_is_gone_on_from_and_not_written() -> None:
    bench = Bench(50, states=3)
    sequence = new_sequence([1] * 9)
    bench.admit(sequence)
    bench.step((sequence, 8))
    assert sequence.states.source != sequence.states.own
    assert snapshots(bench, sequence.tokens) == [8]
    bench.step((sequence, 1))
    assert sequence.states.source == sequence.states.own
    bench.end(sequence)
    assert found(bench, [1] * 9) == 8


def test_a_reply_leaves_its_last_block_end_alone() -> None:
    bench = Bench(50, states=8)
    sequence = new_sequence(PROMPT)
    bench.prefill(sequence)
    for token in range(20, 31):
        bench.decode(sequence, token)
        bench.check()
    assert len(sequence.tokens) == 22
    assert snapshots(bench, sequence.tokens) == [8, 20]
    bench.end(sequence)
    assert found(bench, [*sequence.tokens, 40, 41]) == 20


def test_a_preempted_reply_leaves_its_last_block_end_alone_too() -> None:
    bench = Bench(50, states=8)
    sequence = new_sequence(PROMPT)
    bench.prefill(sequence)
    bench.decode(sequence, *range(20, 26))
    assert snapshots(bench, sequence.tokens) == [8, 16]
    bench.end(sequence)
    bench.prefill(sequence)
    bench.decode(sequence, *range(26, 31))
    assert snapshots(bench, sequence.tokens) == [8, 20]


def test_a_reply_leaves_anothers_snapshot_alone() -> None:
    bench = Bench(50, states=8)
    first, second = new_sequence(PROMPT), new_sequence(PROMPT)
    for sequence in (first, second):
        bench.prefill(sequence)
        sequence.tokens.append(20)
        assert bench.cache.grow(sequence, 12)
    bench.step((first, 1), (second, 1))  # both leave the one after 12 tokens, and the first's is kept
    assert snapshots(bench, first.tokens) == [8, 12]
    bench.decode(second, 21, 22, 23, 24)
    assert snapshots(bench, second.tokens) == [8, 12, 16]  # the first's may serve others than the second
    bench.decode(first, 31, 32, 33, 34)
    assert snapshots(bench, first.tokens) == [8, 16]


@pytest.mark.parametrize(
    ("chunk", "first", "then"),
    [(8, [4], [4, 12]), (9, [8], [12])],  # the same prompt again cannot go on from its very end; another turn can
)
def test_the_very_end_of_a_prompt_is_part_of_the_reply(chunk: int, first: list[int], then: list[int]) -> None:
    bench = Bench(50, states=8)
    sequence = new_sequence([1] * 8)
    sequence.tokens += [2] * 5  # it was preempted, and nothing was left of it
    bench.admit(sequence)
    bench.step((sequence, chunk))
    assert snapshots(bench, sequence.tokens) == first
    bench.step((sequence, 13 - chunk))
    assert snapshots(bench, sequence.tokens) == then


def test_equal_states_are_kept_once() -> None:
    bench = Bench(50, states=8)
    first, second = new_sequence([1] * 8 + [2]), new_sequence([1] * 8 + [3])
    bench.admit(first)
    bench.admit(second)
    bench.step((first, 8), (second, 8))
    assert first.states.source == second.states.source
    assert bench.cache.states.pool.free == 8 - 3
    bench.check()
    bench.step((first, 1), (second, 1))


def test_snapshots_give_way_to_sequences_and_these_run_without() -> None:
    bench = Bench(50, states=2)
    left_behind(bench, PROMPT)
    assert found(bench, PROMPT) == 8
    first, second, third = new_sequence([2] * 9), new_sequence([3] * 9), new_sequence([4] * 9)
    assert bench.admit(first)
    assert bench.admit(second)
    assert not bench.admit(third)
    assert found_nothing(bench, PROMPT)
    bench.step((first, 9), (second, 9))
    bench.decode(first, *range(10))
    assert not bench.cache.states.pool._places


def found_nothing(bench: Bench, tokens: list[int]) -> bool:
    return not snapshots(bench, tokens)


def test_a_snapshot_that_is_there_already_takes_no_slot() -> None:
    bench = Bench(50, states=8)
    left_behind(bench, PROMPT)
    again = new_sequence(PROMPT, scored=True)  # computes it all
    assert bench.admit(again)
    bench.cache.plan(again, 11)
    assert again.states.saves == {10: again.states.own}


def test_nobody_waits_for_a_snapshot_that_found_no_slot() -> None:
    bench = Bench(50, states=2)
    bench.prefill(new_sequence([5]))
    first = new_sequence(PROMPT)
    assert bench.admit(first)
    assert bench.cache.awaits(new_sequence(PROMPT), bench.running)
    bench.step((first, 4))
    assert snapshots(bench, PROMPT) == []
    assert not bench.cache.awaits(new_sequence(PROMPT), bench.running)


def test_a_sequence_that_finds_no_slot_leaves_everything_as_it_was() -> None:
    bench = Bench(50, states=1)
    running = new_sequence([2] * 5)
    bench.prefill(running)
    waiting = new_sequence([2] * 9)
    free = bench.cache.blocks.free
    assert not bench.admit(waiting)
    assert (bench.cache.blocks.free, waiting.blocks) == (free, [])


def test_an_evicted_block_takes_its_snapshot_along() -> None:
    bench = Bench(4, states=4)
    left_behind(bench, [1] * 9)
    assert snapshots(bench, [1] * 9) == [8]
    bench.prefill(new_sequence([2] * 13))
    assert snapshots(bench, [1] * 9) == []
    bench.check()


@pytest.mark.parametrize("states", [0, 8])
@given(data=st.data())
def test_the_states_after_drafts_are_those_of_the_last_that_holds(states: int, data: st.DataObject) -> None:
    bench = Bench(60, states=states)
    sequence = new_sequence([1] * data.draw(st.integers(1, 9)))
    bench.prefill(sequence)
    for _ in range(6):
        sequence.tokens.append(data.draw(st.integers(0, 9)))
        drafted = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        accepted = data.draw(st.integers(0, len(drafted)))
        before = sequence.computed
        assert bench.drafts(sequence, drafted, accepted)
        assert sequence.computed == before + 1 + accepted == len(sequence.tokens)
        bench.check()
    if states:  # its own, the snapshots, and one of these if it goes on from there
        assert bench.cache.states.pool.free >= 8 - 2
    bench.end(sequence)
    assert bench.cache.states.pool.free == states


def test_drafts_that_find_no_room_change_nothing() -> None:
    bench = Bench(3, states=3)
    sequence = new_sequence([1] * 7)
    bench.prefill(sequence)
    sequence.tokens.append(2)
    blocks = list(sequence.blocks)
    assert bench.cache.reserve_drafts(sequence, 6) is None  # slots
    assert bench.cache.reserve_drafts(sequence, 7) is None  # blocks
    assert (sequence.blocks, sequence.states.saves) == (blocks, {})
    assert bench.cache.reserve_drafts(sequence, 2) is not None


@pytest.mark.parametrize("drafted", [True, False])
def test_drafts_leave_the_snapshots_of_plain_decoding(drafted: bool) -> None:
    bench = Bench(50, states=8)
    sequence = new_sequence([1] * 6)
    bench.prefill(sequence)
    if drafted:
        sequence.tokens.append(2)
        bench.drafts(sequence, [3], accepted=1)
    else:
        bench.decode(sequence, 2, 3)
    assert snapshots(bench, sequence.tokens) == [4, 8]


def test_drafts_that_hold_leave_a_snapshot_where_a_block_ended() -> None:
    bench = Bench(50, states=8)
    sequence = new_sequence([1] * 6)
    bench.prefill(sequence)
    sequence.tokens.append(2)
    bench.drafts(sequence, [3, 4, 5], accepted=2)
    assert snapshots(bench, sequence.tokens) == [4, 8]
    bench.check()
    sequence.tokens.append(6)
    bench.drafts(sequence, [7, 8, 9], accepted=0)
    assert snapshots(bench, sequence.tokens) == [4, 8]
