"""Walks over the instances of one backend and family, and the shortest walk that still fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pocketllm.runtimes.base import Runtime
from tests.runtimes.conformance.machine import BrokenContractError, Machine
from tests.runtimes.conformance.memory import Store
from tests.runtimes.conformance.models import Scale, load
from tests.runtimes.conformance.serial import Serial

LOOKS = 100
"""Steps between two looks at the memory that nobody owns."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A runtime of a backend with a number of threads; None is the backend's default."""

    backend: str
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A walk that can be taken again.

    Attributes:
        instances: that take steps by turns: step i is that of instance ``i % len(instances)``.
        folder: of the checkpoint.
        scale: of its model and contexts.
        seed: with a step's number, all that the step depends on.
        machine: what walks.
        store: makes the store by which instances exchange contexts.
        change: is shown each instance that walks, to break something.
    """

    instances: Sequence[Instance]
    folder: Path
    scale: Scale
    seed: int = 1
    machine: type[Machine] = Machine
    store: Callable[[], Store] = Store
    change: Callable[[Runtime], None] | None = None

    def take(self, steps: Sequence[int], progress: Callable[[int], None] = lambda done: None) -> Counter[str]:
        """Take these steps; how often each thing happened. BrokenContractError where the contract is broken."""
        store = self.store()
        alone = {one.backend: self._alone(one) for one in reversed(self.instances)}
        machines = [self._machine(one, alone[one.backend], store) for one in self.instances]
        for done, number in enumerate(steps, start=1):
            machine = machines[number % len(machines)]
            machine.step(number)
            if done % LOOKS == 0:
                machine.look_at_unowned()
            progress(done)
        for machine in machines:
            machine.finish()
        for serial in alone.values():
            serial.close()
        return sum((machine.counts for machine in machines), Counter())

    def _alone(self, instance: Instance) -> Serial:
        return Serial(load(instance.backend, self.folder, instance.threads), self.scale.longest)

    def _machine(self, instance: Instance, serial: Serial, store: Store) -> Machine:
        runtime = load(instance.backend, self.folder, instance.threads)
        if self.change is not None:
            self.change(runtime)
        return self.machine(runtime, serial, store, self.scale, self.seed)

    def failure(self, steps: Sequence[int]) -> BrokenContractError | None:
        """How these steps fail, or None."""
        try:
            self.take(steps)
        except BrokenContractError as failure:
            return failure
        return None

    def shortened(self, steps: Sequence[int]) -> list[int]:
        """Failing steps with as many left out as can be: halves first, then smaller parts, then single ones."""
        kept = list(steps)
        size = len(kept) // 2
        while size:
            start = 0
            while start < len(kept):
                fewer = kept[:start] + kept[start + size :]
                if self.failure(fewer) is None:
                    start += size
                else:
                    kept = fewer
            size //= 2
        return kept
