"""The fields that chat and plain completions share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StringConstraints, Tag, WithJsonSchema

from pocketllm.protocol.fields import Default, NotServed, RequestObject
from pocketllm.types import MAX_CHOICES, SEED_LIMIT, SamplingParams

MAX_STOP_STRINGS = 128
MAX_STOP_CHARACTERS = 1024
BIAS_LIMIT = 100


def _stop_shape(value: Any) -> str | None:
    return "string" if isinstance(value, str) else "strings" if isinstance(value, list) else None


def _biases(value: Any) -> Any:
    """JSON's string keys as token ids; ValueError at the first entry that cannot be used."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"an object from token id to a number from {-BIAS_LIMIT} to {BIAS_LIMIT}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # int() would also take signs, white space, underscores and the digits of other scripts; a zero in front would
        # let two keys mean one token.
        if not (key.isascii() and key.isdigit() and len(key) < 20 and (key == "0" or key[0] != "0")):
            raise ValueError(f"an object whose keys are token ids, whole numbers of at least 0, unlike {key[:20]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > BIAS_LIMIT:
            raise ValueError(f"a number from {-BIAS_LIMIT} to {BIAS_LIMIT} for each token id, also for {key}")
        biases[int(key)] = float(bias)
    return biases


StopString = Annotated[str, StringConstraints(max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[StopString, Tag("string")]
    | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("strings")],
    Discriminator(_stop_shape, custom_error_type="stop_shape", custom_error_message="a string or a list of strings"),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_biases),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": "number", "minimum": -BIAS_LIMIT, "maximum": BIAS_LIMIT}}
    ),
]
TokenId = Annotated[int, Field(ge=0)]
REQUEST_ID = "1 to 128 visible ASCII characters"
"""Nothing else, because the id comes back in a header."""


def checked_request_id(value: str) -> str:
    """The id; ValueError, which says what to give, when it cannot be used."""
    if not re.fullmatch(r"[!-~]{1,128}", value):
        raise ValueError(REQUEST_ID)
    return value


RequestId = Annotated[str, AfterValidator(checked_request_id)]


class StreamOptions(RequestObject):
    """What a stream carries besides its deltas."""

    include_usage: Annotated[
        bool | None,
        Field(description="Send the usage in a last chunk without choices, before [DONE]."),
        Default("false"),
    ] = None
    include_obfuscation: Annotated[Any, NotServed("chunks are never padded", False)] = None


class InertFields(RequestObject):
    """Fields that cannot change the text; they are accepted and not read."""

    model: Annotated[str | None, Field(description="One model is served; its name comes back whatever is sent.")] = None
    user: Annotated[str | None, Field(description="Inert.")] = None
    store: Annotated[bool | None, Field(description="Inert.")] = None
    metadata: Annotated[dict[str, Any] | None, Field(description="Inert.")] = None
    service_tier: Annotated[str | None, Field(description="Inert.")] = None
    prompt_cache_key: Annotated[str | None, Field(description="Inert.")] = None
    safety_identifier: Annotated[str | None, Field(description="Inert.")] = None
    cache_control: Annotated[Any, Field(description="Inert.")] = None


class GenerationFields(InertFields):
    """Fields of every route that generates text."""

    max_tokens: Annotated[
        int | None, Field(ge=1, description="The reply's budget in tokens."), Default("the rest of the context window")
    ] = None
    max_completion_tokens: Annotated[
        int | None,
        Field(ge=1, description="The newer name of max_tokens; it wins where both are given."),
        Default("max_tokens"),
    ] = None
    min_tokens: Annotated[
        int | None,
        Field(ge=0, description="No end-of-sequence token is drawn before the reply has this many tokens."),
        Default("0"),
    ] = None
    temperature: Annotated[
        float | None, Field(ge=0, le=2, description="0 is greedy."), Default("the checkpoint's, else 1")
    ] = None
    top_p: Annotated[
        float | None, Field(gt=0, le=1, description="Nucleus mass; 1 is off."), Default("the checkpoint's, else 1")
    ] = None
    top_k: Annotated[
        int | None,
        Field(ge=-1, description="How many of the likeliest tokens stay; 0 and -1 are off."),
        Default("the checkpoint's, else 0"),
    ] = None
    min_p: Annotated[
        float | None,
        Field(
            ge=0, le=1, description="Least probability relative to the likeliest token, after temperature; 0 is off."
        ),
        Default("the checkpoint's, else 0"),
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=-1, le=SEED_LIMIT - 1, description="Fixes the draw; -1 is the same as none."),
        Default("one is drawn, and reported"),
    ] = None
    frequency_penalty: Annotated[
        float | None, Field(ge=-2, le=2, description="Times the count of a token in the reply so far."), Default("0")
    ] = None
    presence_penalty: Annotated[
        float | None, Field(ge=-2, le=2, description="Once for each token that the reply has."), Default("0")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Field(gt=0, le=10, description="Scales the logits of tokens in prompt and reply; 1 is off."),
        Default("the checkpoint's, else 1"),
    ] = None
    logit_bias: Annotated[
        LogitBias | None,
        Field(description=f"Token id to a number from {-BIAS_LIMIT} to {BIAS_LIMIT}, added to its logit."),
        Default("none"),
    ] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES, description="Independent choices."), Default("1")] = None
    stop: Annotated[
        Stop | None,
        Field(
            description=f"Up to {MAX_STOP_STRINGS} strings that end the reply and are not part of it; empty ones match "
            "nothing."
        ),
        Default("none"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Field(fail_fast=True)] | None,
        Field(description="Ids that end the reply like the model's own end-of-sequence ids."),
        Default("none"),
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="Go on past the model's own end-of-sequence ids."), Default("false")
    ] = None
    cache_prompt: Annotated[
        bool | None,
        Field(description="Take from the prefix cache what it has of the prompt, and leave there what is computed."),
        Default("true"),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        Field(description="Report token_ids with each choice, and the prompt's as prompt_token_ids."),
        Default("false"),
    ] = None
    stream: Annotated[bool | None, Field(description="Send the reply as server-sent events."), Default("false")] = None
    stream_options: Annotated[StreamOptions | None, Field(description="Read when stream is true.")] = None
    request_id: Annotated[
        RequestId | None,
        Field(description=f"{REQUEST_ID} by which the request can be cancelled while it runs."),
    ] = None
    timeout: Annotated[
        float | None,
        Field(gt=0, description="Seconds for the whole request, all its choices together."),
        Default("the server's limit"),
    ] = None

    @property
    def reported_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside each of the reply, or None to report nothing."""
        return None

    @property
    def prefill_only(self) -> bool:
        """Whether only the prompt is computed."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens are scored."""
        return False

    def sampling_params(self) -> SamplingParams:
        """How the replies are drawn."""
        budget = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return SamplingParams(
            max_tokens=None if self.prefill_only else budget,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            n=self.n or 1,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.reported_logprobs,
            cache_prompt=self.cache_prompt is not False,
        )

    def field_name(self, param: str | None) -> str | None:
        """The field of this request behind a parameter that the engine names."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return param

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
