"""From sampling parameters to the rows that a runtime draws tokens by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pocketllm.errors import CheckpointError
from pocketllm.runtimes.base import SamplingRows
from pocketllm.types import SamplingParams

if TYPE_CHECKING:
    from pocketllm.engine.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what a request leaves open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, Any]) -> SamplingDefaults:
        """The defaults that a checkpoint's ``generation_config.json`` names; the others stay off.

        ``do_sample: false`` there means greedy, as it does for transformers.
        """
        named = {name: raw[name] for name in cls.__slots__ if raw.get(name) is not None}
        if raw.get("do_sample") is False:
            named["temperature"] = 0.0
        try:
            checked = SamplingParams(**named)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"generation_config.json: {error}") from None
        return cls(**{name: getattr(checked, name) for name in named})


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters with every default filled in; ranges are those of `SamplingParams`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int

    @property
    def penalises(self) -> bool:
        """Whether tokens that occurred before are treated differently."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


def resolve(params: SamplingParams, defaults: SamplingDefaults) -> ResolvedSampling:
    """The request's values, else the defaults."""

    def given(name: str) -> Any:
        value = getattr(params, name)
        return getattr(defaults, name) if value is None else value

    return ResolvedSampling(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=max(given("top_k"), 0),
        min_p=given("min_p"),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=given("repetition_penalty"),
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Adjustments:
    """One row's adjusted tokens."""

    ids: npt.NDArray[np.int32]
    bias: npt.NDArray[np.float32]
    count: npt.NDArray[np.int32]
    seen: npt.NDArray[np.bool_]


_NOTHING = _Adjustments(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0, np.bool_))


def _contained(ids: npt.NDArray[np.int32], within: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which of the ids are in an array that is in order."""
    found: npt.NDArray[np.bool_] = np.append(within, np.int32(-1))[np.searchsorted(within, ids)] == ids
    return found


def _adjustments(sequence: TokenSequence) -> _Adjustments:
    """Tokens whose logits change: biased ones, ones seen before where penalties act, ends that come too early."""
    sampling = sequence.sampling
    bias = dict(sampling.logit_bias)
    if sequence.generated < sampling.min_tokens:
        bias |= dict.fromkeys(sequence.end_ids, -math.inf)
    if not (bias or sampling.penalises):
        return _NOTHING
    reply = np.fromiter(sequence.counts, dtype=np.int32)
    seen = np.zeros(0, dtype=np.int32)
    if sampling.repetition_penalty != 1.0:
        assert sequence.seen is not None, "a repetition penalty asks for them"
        seen = sequence.seen
    elif sampling.penalises:
        seen = np.sort(reply)
    biased = np.fromiter(bias, dtype=np.int32)
    unseen = np.sort(biased[~_contained(biased, seen)])
    ids = np.insert(seen, np.searchsorted(seen, unseen), unseen)
    adjusted = _Adjustments(
        ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), np.ones(len(ids), np.bool_)
    )
    adjusted.bias[np.searchsorted(ids, biased)] = list(bias.values())
    adjusted.seen[np.searchsorted(ids, unseen)] = False
    counted = _contained(reply, ids)
    adjusted.count[np.searchsorted(ids, reply[counted])] = np.fromiter(sequence.counts.values(), np.int32)[counted]
    return adjusted


def sampling_rows(sequences: Sequence[TokenSequence]) -> SamplingRows:
    """The rows for the next token of each sequence."""
    sampling = [sequence.sampling for sequence in sequences]
    adjusted = [_adjustments(sequence) for sequence in sequences]

    def floats(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.array([getattr(row, name) for row in sampling], dtype=np.float32)

    def joined(name: str) -> np.ndarray[Any, Any]:
        return np.concatenate([getattr(row, name) for row in (_NOTHING, *adjusted)])

    return SamplingRows(
        seed=np.array([sequence.seed for sequence in sequences], dtype=np.uint64),
        position=np.array([len(sequence.tokens) for sequence in sequences], dtype=np.int32),
        temperature=floats("temperature"),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        top_k=np.minimum([row.top_k for row in sampling], np.iinfo(np.int32).max).astype(np.int32),
        frequency_penalty=floats("frequency_penalty"),
        presence_penalty=floats("presence_penalty"),
        repetition_penalty=floats("repetition_penalty"),
        adjust_start=np.cumsum([0, *(len(row.ids) for row in adjusted)], dtype=np.int32),
        adjust_ids=joined("ids"),
        adjust_bias=joined("bias"),
        adjust_count=joined("count"),
        adjust_seen=joined("seen"),
    )
