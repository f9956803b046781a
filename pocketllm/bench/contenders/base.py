"""What a benchmark asks of an engine."""

from __future__ import annotations

import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

LogProbabilities = npt.NDArray[np.float32]
Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Setup:
    """What every contender is made with.

    Attributes:
        path: the checkpoint.
        threads: CPU threads.
        sequences: most sequences at once.
        context: most tokens of a sequence.
        device: such as ``auto`` or ``cuda``; other engines than ours run on the CPU.
    """

    path: Path
    threads: int
    sequences: int
    context: int
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Decoded:
    """Greedy replies that were written at once.

    Attributes:
        token_ids: one reply for each prompt.
        steps: tokens counted, those of all replies but what was there when the clock started.
        seconds: from when every reply had its first token to when all were finished.
    """

    token_ids: list[list[int]]
    steps: int
    seconds: float


class Contender(ABC):
    """An engine with the checkpoint; it lives in a process of its own and is made from a `Setup`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Version, build flags and whatever else its figures depend on."""

    @abstractmethod
    def prefill(self, prompt: Tokens) -> float:
        """Seconds from a prompt to its first token; nothing of the prompt may be cached."""

    @abstractmethod
    def decode(self, prompts: Sequence[Tokens], count: int) -> Decoded:
        """Greedy replies of exactly `count` tokens to all prompts at once; no token ends a reply."""

    @abstractmethod
    def log_probabilities(self, tokens: Tokens) -> LogProbabilities:
        """[T, vocab]: the natural logarithm of the distribution after each of `tokens`, read from the first on."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def peak_memory_mib(self) -> float:
        """The most resident memory that this process has had, in MiB."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def log_softmax(logits: npt.NDArray[np.float32]) -> LogProbabilities:
    """Rows of logits as log probabilities; the sum is taken in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: LogProbabilities = (shifted - np.log(total)).astype(np.float32)
    return result
