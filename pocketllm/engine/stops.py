"""Stop strings: found in text that arrives in pieces, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Watches text for the first stop string that is completed.

    Text that may yet turn out to begin a stop string is held back until that is decided.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string that was completed, if one was.

        Of several matches the one that ends first counts, and of those the one that begins first; the text ends where
        it begins.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        matches = []
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:
            _, start, stop = min(matches)
            self._held = ""
            return pending[:start], stop
        cut = len(pending) - self._undecided(pending)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back; nothing can complete it any more."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
