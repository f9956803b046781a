"""Numbered places of a cache: counted by holder, found by the key of what is in them, emptied when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


def _nobody_asks(key: bytes) -> None:
    """Evictions that concern nothing else."""


class Pool:
    """The places of a cache, handed out by number; what lies in them is the runtime's.

    A place is *held* by one or more, *kept* (nobody holds it, and its key still finds it), or empty. Room is made of
    empty places first, then of kept ones, the least recently released first.

    Keys form chains, and holders of a place hold all before it in its chain. Those who release a chain from its end on
    therefore see it evicted from its end on: what can be found is always a chain without gaps.

    Attributes:
        total: places that there are.
    """

    def __init__(self, total: int, evicted: Callable[[bytes], None] = _nobody_asks) -> None:
        """`evicted` is told the key of each place that is emptied to make room."""
        self.total = total
        self._evicted = evicted
        # Taken from the end: the place that was emptied last is used first, while its memory is warm.
        self._empty = list(range(total - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * total
        self._keys: list[bytes | None] = [None] * total
        self._places: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return len(self._empty) + len(self._kept)

    def find(self, key: bytes) -> int | None:
        """The place with that key, held or kept."""
        return self._places.get(key)

    def place(self, key: bytes) -> int:
        """The place with that key; KeyError where there is none."""
        return self._places[key]

    def held(self, place: int) -> bool:
        """Whether anybody holds the place."""
        return self._holders[place] > 0

    def take(self, count: int) -> list[int] | None:
        """So many places, held once and without a key; None, and nothing changed, when fewer are free."""
        if count > self.free:
            return None
        while len(self._empty) < count:
            place, _ = self._kept.popitem(last=False)
            key = self._keys[place]
            assert key is not None, "only what a key finds is kept"
            self._unname(place)
            self._empty.append(place)
            self._evicted(key)
        taken = [self._empty.pop() for _ in range(count)]
        for place in taken:
            self._holders[place] = 1
        return taken

    def hold(self, places: Iterable[int]) -> None:
        """One more holder for places that were found."""
        for place in places:
            self._kept.pop(place, None)
            self._holders[place] += 1

    def release(self, places: Iterable[int]) -> None:
        """One holder less; a place without any is kept if it has a key, else empty."""
        for place in places:
            self._holders[place] -= 1
            if self._holders[place]:
                continue
            if self._keys[place] is None:
                self._empty.append(place)
            else:
                self._kept[place] = None

    def publish(self, place: int, key: bytes) -> int:
        """Let the key find a place that the caller holds; where it finds another one already, trade the two.

        Returns the place that the caller holds from now on: what lies in both is the same.
        """
        known = self._places.get(key)
        if known is None:
            self._keys[place] = key
            self._places[key] = place
            return place
        self.hold([known])
        self.release([place])
        return known

    def forget(self, key: bytes) -> None:
        """Let the key find nothing; its place is empty if nobody holds it."""
        place = self._places.get(key)
        if place is None:
            return
        self._unname(place)
        if place in self._kept:
            del self._kept[place]
            self._empty.append(place)

    def _unname(self, place: int) -> None:
        key = self._keys[place]
        if key is not None:
            del self._places[key]
        self._keys[place] = None
