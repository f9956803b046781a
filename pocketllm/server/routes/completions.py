"""``POST /v1/completions``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flask import Blueprint, Response

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.openai.completions import ID_PREFIX, CompletionReply, CompletionRequest
from pocketllm.server.answering import generate, request_fields
from pocketllm.server.state import ServerState
from pocketllm.types import Prompt

if TYPE_CHECKING:
    from pocketllm.engine.engine import Engine


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
        token_ids = [
            engine.encode_prompt(prompt, add_special_tokens=fields.add_special_tokens is not False)
            for prompt in prompts
        ]
        echoes = _echoes(engine, prompts, fields.n or 1) if fields.echo else ()
        reply_of = partial(CompletionReply, echoes=echoes)
        return generate(state, engine, fields, token_ids, id_prefix=ID_PREFIX, reply_of=reply_of)

    return routes


def _echoes(engine: Engine, prompts: list[Prompt], n: int) -> list[str]:
    """The prompt's text for each choice."""
    return [text for prompt in prompts for text in [_text(engine, prompt)] * n]


def _text(engine: Engine, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    try:
        return engine.tokenizer.decode(prompt)
    except ValueError as error:  # a model may have more ids than its tokenizer has texts
        raise InvalidRequestError(f"The prompt cannot be echoed: {error}.", param="prompt") from None
