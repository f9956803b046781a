"""What a request must be for an engine to take it: within the window, and of the model's own token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.errors import InvalidRequestError
from pocketllm.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """The checks that the request and the model alone decide.

    Attributes:
        window: most tokens of a prompt and its reply.
        vocab_size: token ids go up to it.
        longest_token: characters of the tokenizer's longest token.
        end_ids: ids that end a reply unless a request ignores them.
    """

    window: int
    vocab_size: int
    longest_token: int
    end_ids: frozenset[int]

    def check_size(self, *texts: object) -> None:
        """Refuse texts that cannot fit before time is spent on them. Normalisation shrinks a text by less than four."""
        for text in texts:
            if isinstance(text, str) and len(text) // (4 * self.longest_token) > self.window:
                raise InvalidRequestError(
                    f"This server's maximum context length is {self.window} tokens; a text of {len(text)} characters "
                    "has more, whatever they are: shorten it",
                    param="prompt",
                    code="context_length_exceeded",
                    details={"n_ctx": self.window},
                )

    def reply_budget(self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prefill_only: bool) -> int:
        """The tokens that a reply may have.

        Raises:
            InvalidRequestError: the prompt is empty, or it and its reply cannot fit the window; a token id of it, of
                the bias or of the stops is outside the vocabulary; nothing is left to be drawn.
        """
        budget = self._budget(len(prompt_token_ids), 0 if prefill_only else params.max_tokens)
        if max(prompt_token_ids) >= self.vocab_size:
            raise InvalidRequestError(
                f"the prompt has token id {max(prompt_token_ids)}, and the model's vocabulary ends at "
                f"{self.vocab_size - 1}: it and the tokenizer are not of one model",
                param="prompt",
            )
        self._check_token_ids(params)
        if params.min_tokens and len(self.ends(params)) >= self.vocab_size:
            raise InvalidRequestError(
                "min_tokens keeps every token of stop_token_ids from being drawn, and these are all there are: "
                "leave one of the two out",
                param="stop_token_ids",
            )
        return budget

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end the request's replies."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)

    def _budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        if prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens: give at least one", param="prompt")
        # None takes the rest of the window, which must leave room for one token.
        asked = 1 if max_tokens is None else max_tokens
        if prompt_tokens + asked > self.window:
            reply = "a reply of at least 1" if max_tokens is None else f"a reply of up to {max_tokens}"
            raise InvalidRequestError(
                f"This server's maximum context length is {self.window} tokens; the prompt has {prompt_tokens} and "
                f"{reply} does not fit beside it: shorten the prompt or ask for a shorter reply",
                param="prompt" if prompt_tokens >= self.window else "max_tokens",
                code="context_length_exceeded",
                details={"n_prompt_tokens": prompt_tokens, "n_ctx": self.window},
            )
        return self.window - prompt_tokens if max_tokens is None else max_tokens

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token_id}; ids go from 0 to {self.vocab_size - 1}", param=name
                    )
