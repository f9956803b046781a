"""The values that cross the layers: sampling parameters, results, events and capabilities.

Nothing here knows a tensor library, a protocol or a thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

from pocketllm.display import reply_html, score_html

FinishReason = Literal["stop", "length", "cancelled", "error"]

Prompt = str | Sequence[int]
"""A text, or token ids that are run as given."""

Message = Mapping[str, Any]
"""A chat message in OpenAI's shape: ``role``, ``content`` and what goes with the role."""

SEED_LIMIT = 2**64
MAX_LOGPROBS = 20
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers that a field takes.

    Attributes:
        integer: whether only whole numbers are.
        least, most: the bounds; `most` is infinity where there is no upper one.
        open_below: whether `least` itself is excluded.
    """

    integer: bool
    least: float
    most: float
    open_below: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        if self.most == math.inf:
            return f"{kind} of at least {self.least}"
        return f"{kind} {'above' if self.open_below else 'from'} {self.least} to {self.most}"

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.open_below and value == self.least)

    def checked(self, name: str, value: Any) -> int | float:
        """The value as an int or float.

        Raises:
            TypeError: it is no number of that kind; booleans, NaN, infinities and numeric strings are none.
            ValueError: it is out of range.
        """
        if isinstance(value, bool) or not isinstance(value, Integral if self.integer else Real):
            raise TypeError(f"{name} is {value!r}: give {self}")
        number = int(value) if isinstance(value, Integral) else float(value)
        if not isinstance(number, int) and not math.isfinite(number):
            raise TypeError(f"{name} is {value!r}, which is no finite number: give {self}")
        if number not in self:
            raise ValueError(f"{name} is {value!r}: give {self}")
        return number if self.integer else float(number)


SAMPLING_RANGES: Mapping[str, NumberRange] = {
    "max_tokens": NumberRange(True, 1, math.inf),
    "temperature": NumberRange(False, 0, 2),
    "top_p": NumberRange(False, 0, 1, open_below=True),
    "top_k": NumberRange(True, -1, math.inf),
    "min_p": NumberRange(False, 0, 1),
    "seed": NumberRange(True, -1, SEED_LIMIT - 1),
    "frequency_penalty": NumberRange(False, -2, 2),
    "presence_penalty": NumberRange(False, -2, 2),
    "repetition_penalty": NumberRange(False, 0, 10, open_below=True),
    "logit_bias": NumberRange(False, -100, 100),
    "n": NumberRange(True, 1, MAX_CHOICES),
    "stop_token_ids": NumberRange(True, 0, math.inf),
    "min_tokens": NumberRange(True, 0, math.inf),
    "logprobs": NumberRange(True, 0, MAX_LOGPROBS),
}
"""The one table of ranges, by the field of `SamplingParams`; for its collections, the range of each entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a reply is drawn and when it ends. None means "not given": the model's or server's default applies.

    The ranges are those of `SAMPLING_RANGES`.

    Attributes:
        max_tokens: the reply's budget in tokens, at least 1; None is the rest of the context window.
        temperature: 0 (greedy) to 2.
        top_p: nucleus mass, above 0 to 1; 1 is off.
        top_k: how many of the likeliest tokens stay; 0 and -1 are off.
        min_p: 0 (off) to 1: least probability relative to the likeliest token, after temperature.
        seed: 0 to 2**64 - 1; None (or -1) draws one, which is reported with the result.
        frequency_penalty: -2 to 2, times the count of the token in the reply so far.
        presence_penalty: -2 to 2, once for each token that the reply has.
        repetition_penalty: above 0 to 10; divides (or multiplies, below zero) logits of tokens in prompt and reply.
        logit_bias: token id -> -100 to 100, added to its logit.
        n: independent choices, 1 to 128; choice i samples with a seed derived from `seed` and i.
        stop: strings that end the reply; the match is not part of the text. Empty strings match nothing.
        stop_token_ids: ids that end the reply like the model's own end-of-sequence ids.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        min_tokens: no end-of-sequence id (nor one of `stop_token_ids`) is drawn before the reply has this many tokens.
        logprobs: 0 to 20: report the log probability of each token of the reply, and of so many of the likeliest
            beside it; None reports nothing.
        cache_prompt: take what the prefix cache has of the prompt and leave there what is computed; False does neither.

    Raises:
        ValueError: a field is outside its range; the message names field, value and range.
        TypeError: a field has the wrong type (booleans, NaN, infinities and numeric strings are wrong).
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    cache_prompt: bool = True

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            if value is None:  # not given
                value = dict[int, float]() if declared.name == "logit_bias" else declared.default
            if value is not None:
                value = _checked(declared.name, value)
            object.__setattr__(self, declared.name, value)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)


def _checked(name: str, value: Any) -> Any:
    """A field's value in the type that it is kept in."""
    if name == "stop":
        return _strings(value)
    if name == "stop_token_ids":
        return _token_ids(value)
    if name == "logit_bias":
        return _biases(value)
    if name in SAMPLING_RANGES:
        return SAMPLING_RANGES[name].checked(name, value)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give true or false")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise TypeError(f"stop is {value!r}: give a string or a list of strings")
    return tuple(items)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"stop_token_ids is {value!r}: give a list of token ids")
    ids = SAMPLING_RANGES["stop_token_ids"]
    return tuple(int(ids.checked(f"stop_token_ids[{place}]", item)) for place, item in enumerate(value))


def _biases(value: Any) -> dict[int, float]:
    limits = SAMPLING_RANGES["logit_bias"]
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias is {value!r}: give a mapping from token id to {limits}")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TypeError(f"logit_bias has the key {token!r}: keys are token ids, whole numbers of at least 0")
        if token < 0:
            raise ValueError(f"logit_bias has the key {token!r}: keys are token ids, whole numbers of at least 0")
        biases[int(token)] = float(limits.checked(f"logit_bias[{token}]", bias))
    return biases


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request took.

    Attributes:
        prompt_tokens: tokens of the prompt, counted once whatever `n` is.
        completion_tokens: every executed token of every choice, the ones that ended a reply included.
        cached_tokens: prompt tokens whose keys and values were found rather than computed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, int]:
        """The numbers under their own names."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely the model found it, over the whole vocabulary, before bias, temperature and cuts.

    Attributes:
        token_id: the token.
        token: the bytes that it stands for; a token may be part of a character.
        logprob: natural logarithm of its probability; -inf for one that the model rules out.
        top: the likeliest tokens at its place, likeliest first; their own `top` is empty.
    """

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a choice's time went, in seconds.

    Attributes:
        waiting: from submission to the first step.
        prefill: from there to the first token.
        decode: from there to the last token.
    """

    waiting: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a finished request.

    Attributes:
        index: which choice.
        text: the reply; neither an end-of-sequence token nor a stop match is part of it.
        token_ids: the tokens that `text` comes from.
        finish_reason: why it ended.
        stop_match: the stop string that ended it, or None.
        logprobs: one entry for each of `token_ids`, or None when they were not asked for.
        completion_tokens: executed tokens of this choice.
        token_sha: SHA-256 of every executed token id (int32, little-endian), in hexadecimal: two runs that drew the
            same tokens have the same.
        timing: where its time went, or None while it is not finished.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_match: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    completion_tokens: int = 0
    token_sha: str = ""
    timing: Timing | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request; the fields `text`, `token_ids`, `finish_reason` and `stop_match` are the first choice's.

    Attributes:
        request_id: by which it could be cancelled.
        prompt_token_ids: the prompt as it was run.
        outputs: every choice, in the order of their index.
        seed: the seed that was used, given or drawn.
        usage: tokens taken.
        prompt_logprobs: one entry for each token of the prompt, None for the first, which nothing precedes; None
            altogether when they were not asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    seed: int
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the first choice."""
        return self.outputs[0].stop_match

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The first choice's log probabilities."""
        return self.outputs[0].logprobs

    def _repr_html_(self) -> str:
        return reply_html(self)


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely a model finds a prompt.

    Attributes:
        request_id: by which it could be cancelled.
        prompt_token_ids: the prompt as it was run.
        tokens: the bytes that each of its tokens stands for.
        logprobs: one entry for each token, None for the first, which nothing precedes.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    tokens: tuple[bytes, ...]
    logprobs: tuple[TokenLogprob | None, ...]

    @property
    def total_logprob(self) -> float:
        """Natural logarithm of the probability of all tokens after the first; 0 where there are none."""
        return math.fsum(entry.logprob for entry in self.logprobs if entry is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log probability of the tokens after the first; NaN where there are none."""
        scored = len(self.logprobs) - 1
        if scored < 1:
            return math.nan
        mean = -self.total_logprob / scored
        return math.exp(mean) if mean < 700 else math.inf  # exp overflows a little above

    def _repr_html_(self) -> str:
        return score_html(self)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one choice while it is generated.

    Attributes:
        request_id: of the request.
        prompt_index: which prompt of the call.
        index: which choice of the prompt.
        text: text that became certain since the last event; it never splits a character, and the texts joined are
            the finished text. It may be empty.
        token_ids: the tokens that begin in this text.
        logprobs: one entry for each of `token_ids`, or None when they were not asked for.
        finish_reason: set on the choice's last event.
        metadata: further facts; on the last event ``stop_match``, ``completion_tokens``, ``seed``, ``token_sha`` and
            ``timing``; on the first ``prompt_logprobs``, when they were asked for.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine with a loaded model can do; the offline API and the server branch on it.

    Attributes:
        backend: the backend that runs the model.
        backend_reason: why this one was chosen.
        device: such as ``cpu`` or ``cuda:0``.
        dtype: the activation dtype.
        model_type: the checkpoint's family.
        max_sequences: how many sequences share a step.
        max_model_len: the context window of one request, prompt and reply together.
        chunked_prefill: a long prompt is computed in pieces beside running replies.
        paged_kv: keys and values lie in blocks that sequences take and give back.
        prefix_cache: prompts that begin like earlier ones are computed from where they part.
        batch_invariant: None when the same request gives the same bits whatever runs beside it, else why not.
        details: further facts, such as ``eos_source``.
    """

    backend: str
    backend_reason: str
    device: str
    dtype: str
    model_type: str
    max_sequences: int
    max_model_len: int
    chunked_prefill: bool
    paged_kv: bool
    prefix_cache: bool
    batch_invariant: str | None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        facts = (f"    {entry.name}={getattr(self, entry.name)!r},\n" for entry in fields(self))
        return f"Capabilities(\n{''.join(facts)})"
