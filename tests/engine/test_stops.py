"""Stop strings: the result does not depend on how the text was cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pocketllm.engine.stops import StopMatcher

ALPHABET = "abc"
texts = st.text(ALPHABET, max_size=24)
stop_lists = st.lists(st.text(ALPHABET, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character: the first moment at which the text so far ends in a stop string decides."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(texts, stop_lists, st.data())
@example("aab", ["ab", "aab"], None)
def test_any_cut_gives_the_same_text(text: str, stops: list[str], data: st.DataObject | None) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text))))) if data else [1, 2]
    bounds = [0, *cuts, len(text)]
    matcher = StopMatcher(stops)
    shown, match = "", None
    for start, end in itertools.pairwise(bounds):
        certain, match = matcher.add(text[start:end])
        shown += certain
        if match:
            break
    else:
        shown += matcher.flush()
    assert (shown, match) == expected(text, stops)


@given(texts, stop_lists)
def test_nothing_shown_is_ever_part_of_a_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for character in text:
        certain, match = matcher.add(character)
        shown += certain
        if match:
            break
    assert expected(text, stops)[0].startswith(shown)


@pytest.mark.parametrize("stops", [["HIJ", "GHIJK"], ["GHIJK", "HIJ"]])
def test_the_match_that_completes_first_decides_whatever_the_order(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.add(piece)[0] for piece in ("DEF", "GH", "I"))
    certain, match = matcher.add("J")
    assert (shown + certain, match) == ("DEFG", "HIJ")


def test_text_is_released_as_soon_as_it_cannot_begin_a_stop() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.add(piece)[0] for piece in ("DEF", "GH", "X")] == ["", "", "DEFGHX"]
