"""Sequences as the engine makes them, without an engine."""

from __future__ import annotations

from collections.abc import Iterable

from pocketllm.engine.reply import Reply
from pocketllm.engine.request import RequestHandle
from pocketllm.engine.sampler import SamplingDefaults, resolve
from pocketllm.engine.sequence import Sequence, distinct
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary

VOCABULARY = Vocabulary()
LETTER = 65


def new_sequence(
    prompt: Iterable[int],
    params: SamplingParams | None = None,
    *,
    arrival: int = 0,
    budget: int = 100,
    seed: int = 0,
    end_ids: Iterable[int] = (),
    scored: bool = False,
    shares_prefix: bool = True,
) -> Sequence:
    """A sequence that nothing was computed of; `scored` asks for its prompt's log probabilities."""
    tokens = list(prompt)
    sampling = resolve(params or SamplingParams(), SamplingDefaults())
    return Sequence(
        handle=RequestHandle(f"r{arrival}", tuple(tokens), seed=seed, n=1, cancel=lambda _: True),
        index=0,
        prompt_index=0,
        arrival=arrival,
        tokens=tokens,
        prompt_length=len(tokens),
        sampling=sampling,
        seed=seed,
        budget=budget,
        end_ids=frozenset(end_ids),
        reply=Reply(VOCABULARY.tokenizer, ()),
        prompt_logprobs=[None] if scored else None,
        shares_prefix=shares_prefix,
        seen=distinct(tokens) if sampling.repetition_penalty != 1.0 else None,
    )
