"""What is found for a prompt, what is left for the next one, and what goes first when room is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.cached import SIZE, Bench
from tests.engine.sequences import new_sequence

LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]  # two full blocks and three tokens
AMPLE = 200


def left_behind(bench: Bench, tokens: list[int]) -> None:
    """A prompt that was computed at once and has ended."""
    sequence = new_sequence(tokens)
    bench.prefill(sequence)
    bench.end(sequence)


def found(bench: Bench, tokens: list[int], **kwargs) -> int:
    """How many tokens of a prompt the cache has."""
    sequence = new_sequence(tokens, **kwargs)
    assert bench.admit(sequence)
    computed = sequence.computed
    bench.end(sequence)
    return computed


def kept(bench: Bench, tokens: list[int]) -> int:
    """How many tokens the cache has, whether or not there is room for a sequence."""
    keys = bench.cache.keys
    assert keys is not None
    return SIZE * len(bench.cache.find(keys.chain(keys.root(0), tokens, SIZE)))


@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=6),
    st.lists(st.integers(1, 2), min_size=1, max_size=14),
)
def test_the_longest_run_of_full_blocks_that_leaves_a_token_is_found(
    earlier: list[list[int]], prompt: list[int]
) -> None:
    bench = Bench(AMPLE)
    for tokens in earlier:
        left_behind(bench, tokens)
    known = {tuple(tokens[:end]) for tokens in earlier for end in range(SIZE, len(tokens) + 1, SIZE)}
    expected = 0
    while expected + SIZE < len(prompt) and tuple(prompt[: expected + SIZE]) in known:
        expected += SIZE
    assert found(bench, prompt) == expected


def test_a_whole_number_of_blocks_gives_up_its_last() -> None:
    bench = Bench(AMPLE)
    left_behind(bench, LONG[:8])
    assert found(bench, LONG[:8]) == 4
    assert found(bench, LONG[:9]) == 8


def test_nothing_is_found_before_it_is_computed() -> None:
    bench = Bench(AMPLE)
    first = new_sequence(LONG)
    bench.admit(first)
    assert found(bench, LONG) == 0
    bench.run((first, 8))
    assert found(bench, LONG) == 0  # the step has not come back
    bench.cache.commit(first, 8)
    assert found(bench, LONG) == 8


def test_a_step_that_fails_leaves_nothing() -> None:
    bench = Bench(AMPLE, states=4)
    sequence = new_sequence(LONG)
    bench.admit(sequence)
    bench.run((sequence, 11))
    bench.end(sequence)
    assert found(bench, LONG) == 0
    assert bench.cache.states.pool.free == 4
    assert not bench.cache.states.pool._places


def test_a_reply_is_found_by_the_next_turn() -> None:
    bench = Bench(AMPLE)
    first = new_sequence(LONG)
    bench.prefill(first)
    bench.decode(first, 20, 21)
    bench.end(first)
    assert found(bench, [*LONG, 20, 21, 22]) == 12


def test_prompts_that_are_scored_or_kept_out_take_nothing() -> None:
    bench = Bench(AMPLE)
    left_behind(bench, LONG)
    assert found(bench, LONG, scored=True) == 0
    assert found(bench, LONG, shares_prefix=False) == 0
    assert found(bench, LONG) == 8


def test_a_scored_prompt_leaves_its_blocks_and_one_kept_out_does_not() -> None:
    bench = Bench(AMPLE)
    for place, (tokens, left) in enumerate([(LONG, 8), ([9] * 11, 0)]):
        sequence = new_sequence(tokens, scored=place == 0, shares_prefix=place == 0)
        bench.prefill(sequence)
        bench.end(sequence)
        assert found(bench, tokens) == left


def test_a_prompt_that_is_half_scored_takes_what_it_needs_no_more() -> None:
    bench = Bench(AMPLE)
    left_behind(bench, LONG)
    sequence = new_sequence(LONG, scored=True)
    sequence.prompt_logprobs = [None] * 6  # of the tokens at places 0 to 5: the next needs the logits at place 5
    bench.admit(sequence)
    assert sequence.computed == 4


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    bench = Bench(AMPLE, shared=False)
    left_behind(bench, LONG)
    assert found(bench, LONG) == 0
    assert len(bench.cache.blocks._empty) == AMPLE


def test_equal_blocks_become_one() -> None:
    bench = Bench(AMPLE)
    first, second = new_sequence(LONG), new_sequence([*LONG, 12])
    assert bench.admit(first)
    assert bench.admit(second)
    bench.step((first, 11), (second, 12))
    assert first.blocks[:2] == second.blocks[:2]
    assert second.shared == 3
    bench.check()
    bench.decode(first, 13)
    bench.decode(second, 14)


def test_the_oldest_goes_first_and_a_prefix_from_its_end_on() -> None:
    bench = Bench(6)
    left_behind(bench, [1] * 9)  # two blocks stay, the third is not full
    left_behind(bench, [2] * 9)
    assert found(bench, [1] * 9) == 8  # used last now
    bench.admit(new_sequence([3] * 9))  # takes the two that were empty and one more
    assert kept(bench, [2] * 8) == 4
    assert kept(bench, [1] * 8) == 8


def test_what_is_held_is_not_evicted_and_admission_takes_all_or_nothing() -> None:
    bench = Bench(4)
    first = new_sequence([1] * 9)
    bench.prefill(first)
    second = new_sequence([*[1] * 8, 2, 3, 3, 3, 3])  # two blocks are found, and two more are one too many
    assert not bench.admit(second)
    assert bench.cache.blocks.free == 1
    bench.end(first)
    assert bench.admit(second)
    assert second.computed == 8
    bench.check()


def test_found_blocks_do_not_count_as_room() -> None:
    bench = Bench(4)
    left_behind(bench, [1] * 9)
    sequence = new_sequence([1] * 17)  # needs five blocks, of which two are found: three more, and two are free
    assert not bench.admit(sequence)
    assert found(bench, [1] * 9) == 8


def test_the_next_block_of_a_running_sequence_is_worth_waiting_for() -> None:
    bench = Bench(AMPLE)
    first = new_sequence(LONG)
    same, longer, other = new_sequence(LONG), new_sequence([*LONG, 12]), new_sequence([5] * 9)
    assert not bench.cache.awaits(same, bench.running)
    bench.admit(first)
    assert bench.cache.awaits(same, bench.running)
    assert bench.cache.awaits(longer, bench.running)
    assert not bench.cache.awaits(other, bench.running)
    bench.step((first, 4))
    assert bench.cache.awaits(same, bench.running)
    bench.step((first, 7))
    assert not bench.cache.awaits(same, bench.running)
    assert not bench.cache.awaits(longer, bench.running)  # its third block is nobody's else


def test_nobody_waits_for_a_sequence_that_has_ended_or_is_kept_out() -> None:
    bench = Bench(AMPLE)
    first, apart = new_sequence(LONG), new_sequence(LONG, shares_prefix=False)
    bench.admit(first)
    bench.end(first)
    bench.admit(apart)
    assert not bench.cache.awaits(new_sequence(LONG), bench.running)
