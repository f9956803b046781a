"""Stop strings: found in text that arrives in pieces, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


class StopMatcher:
    """Watches text for the first stop string that is completed.

    Text that may yet turn out to begin a stop string is held back until that is decided. Each character is looked at
    once for each stop string, whatever is held back.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [_Progress(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string that was completed, if one was.

        Of several matches the one that ends first counts, and of those the one that begins first; the text ends where
        it begins.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(character)]
            if complete:
                match = max(complete, key=len)
                self._held = ""
                return pending[: end - len(match)], match
        cut = len(pending) - max(stop.matched for stop in self._stops)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back; nothing can complete it any more."""
        held, self._held = self._held, ""
        return held


class _Progress:
    """How much of one stop string the text so far ends in.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = _shorter_beginnings(text)

    def advance(self, character: str) -> bool:
        """Whether `character` completes the string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


@lru_cache(maxsize=256)
def _shorter_beginnings(text: str) -> tuple[int, ...]:
    """For each beginning of `text` the length of the longest shorter one that it ends in."""
    found = [0]
    matched = 0
    for character in text[1:]:
        while matched and text[matched] != character:
            matched = found[matched - 1]
        if text[matched] == character:
            matched += 1
        found.append(matched)
    return tuple(found)
