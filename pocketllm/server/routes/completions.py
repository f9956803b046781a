"""``POST /v1/completions``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flask import Blueprint, Response

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.openai.completions import ID_PREFIX, CompletionReply, CompletionRequest, Echo
from pocketllm.server.answering import generate, request_fields
from pocketllm.server.state import ServerState
from pocketllm.types import Prompt

if TYPE_CHECKING:
    from pocketllm.engine.engine import Engine


MOST_PROMPT_ENTRIES = 1_000_000
"""Log probabilities of prompts in one reply, about 100 MB while it is made."""


def blueprint(state: ServerState) -> Blueprint:
    """The routes of plain completions."""
    routes = Blueprint("completions", __name__)

    @routes.post("/v1/completions")
    def complete() -> Response:
        engine = state.engine
        fields = request_fields(CompletionRequest)
        prompts = fields.prompts()
        if len(prompts) > state.max_prompts:
            raise InvalidRequestError(
                f"{len(prompts)} prompts are more than this server takes at once: send at most {state.max_prompts}.",
                param="prompt",
            )
        token_ids = [_encoded(engine, prompt, fields) for prompt in prompts]
        _check_entries(fields, token_ids)
        echoes = [_echo(engine, *each) for each in zip(prompts, token_ids, strict=True)] if fields.echo else []
        reply_of = partial(
            CompletionReply,
            n=fields.n or 1,
            echoes=echoes,
            scores_prompt=fields.scores_prompt,
            prompt_token_ids=token_ids if fields.return_token_ids else None,
            control_ids=engine.tokenizer.special_ids,
        )
        return generate(state, engine, fields, token_ids, id_prefix=ID_PREFIX, reply_of=reply_of)

    return routes


def _encoded(engine: Engine, prompt: Prompt, fields: CompletionRequest) -> list[int]:
    adds_special_tokens = fields.add_special_tokens is not False
    if fields.suffix:
        return engine.encode_infill(prompt, fields.suffix, add_special_tokens=adds_special_tokens)
    return engine.encode_prompt(prompt, add_special_tokens=adds_special_tokens)


def _check_entries(fields: CompletionRequest, prompts: list[list[int]]) -> None:
    """Refuse log probabilities of prompts that no memory is meant for: each choice repeats its prompt's."""
    if not fields.scores_prompt:
        return
    entries = sum(map(len, prompts)) * (fields.n or 1) * ((fields.logprobs or 0) + 1)
    if entries > MOST_PROMPT_ENTRIES:
        raise InvalidRequestError(
            f"The prompts' log probabilities would be {entries} numbers, above {MOST_PROMPT_ENTRIES}, the most of a "
            'reply: ask for fewer of the likeliest tokens, for a smaller "n", or score fewer prompts at once.',
            param="logprobs",
        )


def _echo(engine: Engine, prompt: Prompt, token_ids: list[int]) -> Echo:
    tokenizer = engine.tokenizer
    try:
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        tokens = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    except ValueError as error:  # a model may have more ids than its tokenizer has texts
        raise InvalidRequestError(f"The prompt cannot be echoed: {error}.", param="prompt") from None
    return Echo(text, tokens, tokenizer.offsets(text, token_ids))
