"""A saved prefix comes back as it was, and what is not one is refused and changes nothing."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.prefix_image import export_prefix, import_prefix
from pocketllm.errors import InvalidRequestError
from tests.engine.cached import Bench
from tests.engine.sequences import new_sequence
from tests.engine.test_cache_hits import found, kept, left_behind

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def exported(bench: Bench, tokens: list[int]) -> bytes | None:
    return export_prefix(bench.cache, bench.runtime, tokens, rope_length=100)


def imported(bench: Bench, data: bytes) -> int:
    return import_prefix(bench.cache, bench.runtime, data)


def saved(states: int = 0) -> bytes:
    bench = Bench(20, states=states)
    left_behind(bench, PROMPT)
    data = exported(bench, PROMPT)
    assert data is not None
    return data


@pytest.mark.parametrize("states", [0, 4])
def test_a_prefix_comes_back_in_another_cache(states: int) -> None:
    bench = Bench(20, states=states)
    left_behind(bench, [50] * 9)  # its places are taken
    assert imported(bench, saved(states)) == 8
    bench.check()
    sequence = new_sequence([*PROMPT, 12])
    assert bench.admit(sequence)
    assert sequence.computed == 8
    bench.step((sequence, 4))  # which compares what it reads with the tokens
    bench.check()


def test_what_is_there_already_is_kept_once() -> None:
    bench = Bench(20, states=4)
    left_behind(bench, PROMPT[:6])
    held = new_sequence([*PROMPT[:6], 60])
    assert bench.admit(held)
    assert imported(bench, saved(4)) == 8
    assert imported(bench, saved(4)) == 8
    bench.check()
    assert len(bench.cache.blocks._places) == 2
    assert found(bench, PROMPT) == 8


def test_only_what_is_missing_is_brought_in(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(4, states=4)
    left_behind(bench, PROMPT[:6])
    running = new_sequence([7] * 9)
    bench.prefill(running)  # so that room is made of the block that is there, unless it is held
    brought: list[int] = []
    put = bench.runtime.import_blocks

    def import_blocks(blocks: list[int], data: bytes) -> None:
        brought.append(len(blocks))
        put(blocks, data)

    monkeypatch.setattr(bench.runtime, "import_blocks", import_blocks)
    with pytest.raises(InvalidRequestError, match="no room for the prefix's 1 blocks: 0 of 4 are free"):
        imported(bench, saved(4))
    bench.check()
    bench.end(running)
    assert imported(bench, saved(4)) == 8
    assert brought == [1]
    bench.check()
    sequence = new_sequence([*PROMPT, 12])
    assert bench.admit(sequence)
    assert sequence.computed == 8
    bench.step((sequence, 4))


def test_an_imported_prefix_goes_from_its_end_on() -> None:
    bench = Bench(4)
    assert imported(bench, saved()) == 8
    bench.cache.blocks.release(bench.cache.blocks.take(3) or [])
    assert kept(bench, PROMPT) == 4


def test_the_longest_beginning_that_is_cached_is_saved() -> None:
    bench = Bench(20, states=4)
    left_behind(bench, PROMPT)
    assert exported(bench, [*PROMPT[:9], 50, 51, 52]) == exported(bench, PROMPT)
    assert exported(bench, PROMPT[:7]) is None  # a block without states after it
    assert exported(bench, [9, 9]) is None


@given(st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    whole = saved(4)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    shorter = whole[:place]
    longer = whole + bytes(data.draw(st.integers(1, 9)))
    bench = Bench(20, states=4)
    for damaged in (bytes(changed), shorter, longer):
        with pytest.raises(InvalidRequestError):
            imported(bench, damaged)
    assert len(bench.cache.blocks._empty) == 20
    assert len(bench.cache.states.pool._empty) == 4


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    body = data[:-32].replace(old, new, 1)
    return body + hashlib.blake2b(body, digest_size=32).digest()


def test_another_models_prefix_is_refused() -> None:
    bench = Bench(20, identity="other")
    with pytest.raises(InvalidRequestError, match="computed by another model"):
        imported(bench, saved())
    assert len(bench.cache.blocks._empty) == 20


def test_another_version_is_refused() -> None:
    data = resealed(saved(), b"PLLMPRFX\x01", b"PLLMPRFX\x02")
    with pytest.raises(InvalidRequestError, match="version 2 of the format, and this program reads 1"):
        imported(Bench(20), data)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="do not belong together"):
        imported(Bench(20, states=4), saved())  # without states
    bench = Bench(20)
    sizes = [number.to_bytes(8, "little") for number in (8, 32, 0)]
    moved = [number.to_bytes(8, "little") for number in (4, 48, 0)]
    with pytest.raises(InvalidRequestError, match="1 blocks hold 16 bytes, not 48"):
        imported(bench, resealed(saved(), b"".join(sizes), b"".join(moved)))
    assert bench.cache.blocks.free == 20
    assert not bench.cache.blocks._places


@pytest.mark.parametrize("states", [0, 1])
def test_a_prefix_without_room_is_refused(states: int) -> None:
    bench = Bench(4, states=states)
    running = new_sequence([7] * 9)
    bench.prefill(running)
    with pytest.raises(InvalidRequestError, match="no room for the prefix's 2 blocks: 1 of 4 are free"):
        imported(bench, saved(states and 4))
    bench.check()


def test_without_a_prefix_cache_there_is_none_to_save() -> None:
    with pytest.raises(InvalidRequestError, match="the prefix cache is off"):
        exported(Bench(4, shared=False), PROMPT)
