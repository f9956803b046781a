"""Tokens a second of several contenders, measured in turns so that a busy moment of the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from pocketllm.bench import prompts
from pocketllm.bench.contenders import registry
from pocketllm.bench.contenders.base import Decoded, Setup
from pocketllm.bench.process import Remote
from pocketllm.errors import EngineError

SETTLE_SECONDS = 0.1
"""Between two measurements: the threads of the last contender go to sleep."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured.

    Attributes:
        prompt_tokens: length of the prompt whose reading is measured.
        context_tokens: length of the prompts that replies follow.
        reply_tokens: length of the replies.
        sequences: how many replies are written at once.
        repeat: how often each is measured.
    """

    prompt_tokens: int = 512
    context_tokens: int = 32
    reply_tokens: int = 64
    sequences: tuple[int, ...] = (1, 8)
    repeat: int = 5

    @property
    def prefill(self) -> str:
        """The name of reading a prompt."""
        return f"prefill {self.prompt_tokens}"

    @staticmethod
    def decode(sequences: int) -> str:
        """The name of writing so many replies at once."""
        return f"decode {sequences}"

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return {name: getattr(self, name) for name in self.__slots__}


QUICK = Work(prompt_tokens=48, context_tokens=8, reply_tokens=8, sequences=(1, 2), repeat=2)
"""Shows that everything works; its figures mean nothing."""


@dataclass
class Course:
    """What one contender did.

    Attributes:
        rates: tokens a second of each run, by the work's name.
        replies: the token ids of the first run's replies to all prompts at once.
        unequal_repeats: runs whose replies differ from the first run's.
        seconds_to_first_token: from the start of the process, with whatever is loaded and compiled.
        peak_memory_mib: most resident memory of the process.
        facts: version, build flags and the like.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    replies: dict[int, list[list[int]]] = field(default_factory=dict)
    unequal_repeats: int = 0
    seconds_to_first_token: float = 0.0
    peak_memory_mib: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, rate: float) -> None:
        """Count a run."""
        self.rates.setdefault(name, []).append(rate)

    def add_decoded(self, sequences: int, decoded: Decoded) -> None:
        """Count a run, and compare its replies with those of the first."""
        self.add(Work.decode(sequences), decoded.steps / decoded.seconds)
        first = self.replies.setdefault(sequences, decoded.token_ids)
        self.unequal_repeats += decoded.token_ids != first

    def figures(self) -> dict[str, Any]:
        """For the record."""
        return {
            "facts": self.facts,
            "tokens/s": {name: runs_with_median(runs) for name, runs in self.rates.items()},
            "unequal repeats": self.unequal_repeats,
            "seconds from process start to first token": round(self.seconds_to_first_token, 2),
            "peak memory, MiB": round(self.peak_memory_mib),
        }


def runs_with_median(runs: Sequence[float]) -> dict[str, Any]:
    """The runs and their median, to four digits."""
    return {"median": _rounded(median(runs)), "runs": [_rounded(run) for run in runs]}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


class Race:
    """Contenders at the same work.

    Args:
        names: peers, or our backends.
        path: the checkpoint.
        work: what is measured.
        threads: CPU threads of each.
        device: where our backends compute.
    """

    def __init__(self, names: Sequence[str], path: Path, work: Work, *, threads: int, device: str) -> None:
        self.work = work
        self.courses = {name: Course() for name in names}
        self.setup = Setup(
            path=path,
            threads=threads,
            sequences=max(work.sequences),
            context=max(work.prompt_tokens + 1, work.context_tokens + work.reply_tokens),
            device=device,
        )
        token_ids = prompts.tokens(path, prompts.text())
        # One more prompt than is measured: the warm-up's. All of them begin at different places.
        found = prompts.passages(token_ids, work.repeat + 1 + self.setup.sequences, work.prompt_tokens)
        self._warm_up, *self._prompts = found[: work.repeat + 1]
        self.contexts = [passage[: work.context_tokens] for passage in found[work.repeat + 1 :]]
        self._remotes: dict[str, Remote] = {}

    def start(self) -> dict[str, str]:
        """Start every contender and warm it up.

        Returns:
            Peers that could not run the checkpoint, and why; they are out of the race.

        Raises:
            EngineError: one of our backends could not.
        """
        failed = {}
        for name in list(self.courses):
            try:
                self._start(name)
            except EngineError as error:
                if name not in registry.PEERS:
                    raise
                failed[name] = str(error)
                del self.courses[name]
                if name in self._remotes:
                    self._remotes.pop(name).close()
        return failed

    def _start(self, name: str) -> None:
        began = time.perf_counter()
        remote = self._remotes[name] = registry.start(name, self.setup)
        remote.call("prefill", self._warm_up[: self.work.context_tokens])
        self.courses[name].seconds_to_first_token = time.perf_counter() - began
        self.courses[name].facts = remote.call("facts")
        remote.call("prefill", self._warm_up)
        for count in self.work.sequences:
            remote.call("decode", self.contexts[:count], 4)

    def rounds(self) -> Iterator[int]:
        """The numbers of the rounds, with a bar on a terminal."""
        yield from tqdm(range(self.work.repeat), desc="rounds", unit="round", leave=False, disable=None)

    def run(self, round_number: int) -> None:
        """Measure everything once; each round begins with another contender."""
        names = list(self.courses)
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            self._run(name, round_number)

    def _run(self, name: str, round_number: int) -> None:
        remote, course = self._remotes[name], self.courses[name]
        time.sleep(SETTLE_SECONDS)
        seconds = remote.call("prefill", self._prompts[round_number])
        course.add(self.work.prefill, self.work.prompt_tokens / seconds)
        for count in self.work.sequences:
            time.sleep(SETTLE_SECONDS)
            course.add_decoded(count, remote.call("decode", self.contexts[:count], self.work.reply_tokens))

    def close(self) -> None:
        """End every process, and read how much memory each took."""
        while self._remotes:
            name, remote = self._remotes.popitem()
            with remote:
                self.courses[name].peak_memory_mib = remote.call("peak_memory_mib")

    def abandon(self) -> None:
        """End every process after a failure."""
        while self._remotes:
            self._remotes.popitem()[1].close()

    def figures(self) -> Mapping[str, Any]:
        """Of every contender, for the record."""
        return {name: course.figures() for name, course in self.courses.items()}
