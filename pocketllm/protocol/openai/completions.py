"""Plain completions: the request's fields, and the reply whole and in chunks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.fields import Default
from pocketllm.protocol.openai.answer import Answer
from pocketllm.protocol.openai.logprobs import PlacedToken, Placing, completion_logprobs
from pocketllm.protocol.openai.not_served import NotServedCompletionFields
from pocketllm.protocol.openai.reply import ReplyHead, closing_members, usage_members
from pocketllm.protocol.openai.sampling import GenerationFields, TokenId
from pocketllm.types import MAX_LOGPROBS, FinishReason, Prompt, TokenEvent, TokenLogprob

ID_PREFIX = "cmpl-"
KIND = "text_completion"


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    match value[:1]:
        case [int() | float()]:  # a float is refused as an id, which is what it was meant to be
            return "token ids"
        case [list()]:
            return "lists of token ids"
    return "texts"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("texts")]
    | Annotated[list[TokenId], Field(fail_fast=True), Tag("token ids")]
    | Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
        Field(fail_fast=True),
        Tag("lists of token ids"),
    ],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]


class CompletionRequest(GenerationFields, NotServedCompletionFields):
    """The fields of ``POST /v1/completions``."""

    prompt: Annotated[
        Prompts,
        Field(description="A text, several texts, token ids, or several lists of them; special tokens are parsed."),
    ]
    max_tokens: Annotated[
        int | None,
        Field(ge=0, description="The reply's budget in tokens; 0 only with echo, to score the prompt."),
        Default("the rest of the context window"),
    ] = None
    suffix: Annotated[
        str | None,
        Field(
            description="A text for the reply to lead up to, where the tokenizer has fill-in-the-middle tokens; it and "
            "a prompt's text are then plain text, without special tokens."
        ),
        Default("none"),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="Whether a text gets the tokens that the tokenizer's metadata adds."),
        Default("true"),
    ] = None
    echo: Annotated[
        bool | None,
        Field(description="Begin each choice's text with its prompt, and its logprobs too."),
        Default("false"),
    ] = None
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="Report the log probability of each token, and of so many of the likeliest beside it.",
        ),
        Default("none are reported"),
    ] = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.max_tokens == 0 and self.max_completion_tokens is None and not self.echo:
            raise InvalidRequestError(
                '"max_tokens" = 0 is not allowed: give a whole number of at least 1, or 0 together with "echo".',
                param="max_tokens",
            )
        if self.echo and self.suffix:
            raise InvalidRequestError(
                '"echo" = true is not allowed together with "suffix": prompt and suffix are not one text to give back. '
                "Leave one of them out.",
                param="echo",
            )
        return self

    @property
    def reported_logprobs(self) -> int | None:
        """See `GenerationFields.reported_logprobs`."""
        return self.logprobs

    @property
    def prefill_only(self) -> bool:
        """See `GenerationFields.prefill_only`."""
        return self.max_tokens == 0 and self.max_completion_tokens is None

    @property
    def scores_prompt(self) -> bool:
        """See `GenerationFields.scores_prompt`."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[Prompt]:
        """The prompts, one or several, in their order."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back.

    Attributes:
        text: the prompt's text.
        tokens: the bytes of each of its tokens.
        offsets: characters of `text` before each of them.
    """

    text: str
    tokens: Sequence[bytes]
    offsets: Sequence[int]

    def placed(self, entries: Sequence[TokenLogprob | None]) -> list[PlacedToken]:
        """The tokens that were scored: all, unless the request was cancelled on the way."""
        return [PlacedToken(*item) for item in zip(self.tokens, self.offsets, entries, strict=False)]


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Plain completions about one head.

    Attributes:
        head: what every chunk repeats.
        n: choices of each prompt.
        echoes: each prompt, to put before its choices' texts; empty without ``echo``.
        scores_prompt: whether an echoed prompt comes with its log probabilities.
        prompt_token_ids: the prompts, where token ids are part of the reply; else None.
        control_ids: tokens that add nothing to a text.
    """

    head: ReplyHead
    n: int = 1
    echoes: Sequence[Echo] = ()
    scores_prompt: bool = False
    prompt_token_ids: Sequence[Sequence[int]] | None = None
    control_ids: Collection[int] = frozenset()
    _placing: dict[int, Placing] = field(default_factory=dict, init=False)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response without streaming."""
        choices = []
        for index, output in answer.choices:
            logprobs = None
            if output.logprobs is not None:
                prompt = self._echoed(index, answer.prompt(index).prompt_logprobs)
                logprobs = completion_logprobs([*prompt, *self._placed(index, output.logprobs)])
            members = self._prompt_ids(index) | self._ids(output.token_ids)
            text = self._echo_text(index) + output.text
            choices.append(_choice(index, text, logprobs, output.finish_reason, members))
        return self.head.body(KIND, choices, **usage_members(answer), **closing_members(answer))

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A choice's first chunk, where there is something to say before its first token.

        A prompt that is scored comes with its log probabilities, once they are known.
        """
        if self.scores_prompt or not (self.echoes or self.prompt_token_ids is not None):
            return []
        return [self._chunk(index, self._echo_text(index), members=self._prompt_ids(index))]

    def delta(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """More of a choice."""
        chunks = []
        if "prompt_logprobs" in event.metadata:
            logprobs = completion_logprobs(self._echoed(index, event.metadata["prompt_logprobs"]))
            chunks.append(self._chunk(index, self._echo_text(index), logprobs, self._prompt_ids(index)))
        if event.text or event.logprobs or (event.token_ids and self.prompt_token_ids is not None):
            entries = completion_logprobs(self._placed(index, event.logprobs)) if event.logprobs else None
            chunks.append(self._chunk(index, event.text, entries, self._ids(event.token_ids)))
        return chunks

    def finish(self, index: int, reason: FinishReason, answer: Answer | None) -> dict[str, Any]:
        """A choice's last chunk, and with an answer the last that has choices."""
        closing = {} if answer is None else closing_members(answer)
        return self.head.body(KIND, [_choice(index, "", None, reason, {})], **closing)

    def usage(self, answer: Answer) -> dict[str, Any]:
        """The chunk after the last choice's end, when the request asks for it."""
        return self.head.body(KIND, [], **usage_members(answer), **closing_members(answer))

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, members: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return self.head.body(KIND, [_choice(index, text, logprobs, None, members or {})])

    def _echo_text(self, index: int) -> str:
        return self.echoes[index // self.n].text if self.echoes else ""

    def _echoed(self, index: int, entries: Sequence[TokenLogprob | None] | None) -> list[PlacedToken]:
        return self.echoes[index // self.n].placed(entries) if self.echoes and entries is not None else []

    def _placed(self, index: int, entries: Sequence[TokenLogprob]) -> list[PlacedToken]:
        if index not in self._placing:
            self._placing[index] = Placing(len(self._echo_text(index)), self.control_ids)
        return self._placing[index].place(entries)

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {} if self.prompt_token_ids is None else {"token_ids": list(token_ids)}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if self.prompt_token_ids is None:
            return {}
        return {"prompt_token_ids": list(self.prompt_token_ids[index // self.n])}


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None, members: Mapping[str, Any]
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **members}
