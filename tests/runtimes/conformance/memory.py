"""Blocks and slots with their owners counted, and contexts that have been taken out of a runtime."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.runtimes.base import Runtime

POISON = b"\xff"
"""Repeated, a NaN in every floating-point dtype."""


class Pool:
    """What is numbered and shared out. What nobody owns holds poison: reading it shows, and so does writing it.

    Args:
        count: how many there are.
        nbytes: of one.
        read, write: the runtime's export and import of them.
    """

    def __init__(
        self,
        count: int,
        nbytes: int,
        read: Callable[[Sequence[int]], bytes],
        write: Callable[[Sequence[int], bytes], None],
    ) -> None:
        self._nbytes = nbytes
        self._read = read
        self._write = write
        self._free = list(range(count))
        self._owners: Counter[int] = Counter()
        self._poison(self._free)

    @property
    def free(self) -> int:
        """How many nobody owns."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """How many somebody owns."""
        return len(self._owners)

    def owners(self, which: int) -> int:
        """How many own it."""
        return self._owners[which]

    def take(self, count: int, random: Random) -> list[int]:
        """So many that nobody owned; the caller has seen to it that there are as many."""
        taken = [self._free.pop(random.randrange(len(self._free))) for _ in range(count)]
        self._owners.update(taken)
        return taken

    def share(self, which: Sequence[int]) -> None:
        """Each has one more owner."""
        self._owners.update(which)

    def release(self, which: Sequence[int]) -> None:
        """Each has one owner less; with the last its contents go."""
        self._owners.subtract(which)
        free = [one for one in dict.fromkeys(which) if not self._owners[one]]
        for one in free:
            del self._owners[one]
        self._poison(free)
        self._free += free

    def written_unowned(self) -> list[int]:
        """Which of those that nobody owns do not hold poison any more."""
        poison = POISON * self._nbytes
        return [one for one in self._free if self._read([one]) != poison]

    def _poison(self, which: Sequence[int]) -> None:
        if which:
            self._write(which, POISON * (self._nbytes * len(which)))


@dataclass(frozen=True, slots=True)
class Exported:
    """A context outside of every runtime: its tokens, those still to come included, and its exported memory."""

    path: tuple[int, ...]
    rope_length: int
    length: int
    blocks: bytes
    states: bytes
    history: tuple[str, ...]


class Store:
    """Exported contexts of several runtimes, by the engine's key of what they depend on besides their tokens.

    Args:
        identity: of what computed a context; only runtimes of equal identity can go on with each other's.
    """

    def __init__(self, identity: Callable[[Runtime], str] = lambda runtime: runtime.numerics_id) -> None:
        self._identity = identity
        self._contexts: dict[bytes, list[Exported]] = defaultdict(list)

    def of(self, runtime: Runtime) -> list[Exported]:
        """Those that `runtime` can go on with, to be added to and taken from."""
        return self._contexts[PrefixKeys(self._identity(runtime)).root(0)]
