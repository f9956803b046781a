"""``POST /v1/chat/completions``, and how many tokens its prompt has."""

from __future__ import annotations

from functools import partial

from flask import Blueprint, Response

from pocketllm.protocol.openai.chat import ID_PREFIX, ChatReply, ChatRequest
from pocketllm.server.answering import generate, request_fields
from pocketllm.server.respond import json_response
from pocketllm.server.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The routes of chat completions."""
    routes = Blueprint("chat", __name__)

    @routes.post("/v1/chat/completions")
    def chat() -> Response:
        engine = state.engine
        fields = request_fields(ChatRequest)
        prompt = engine.render_chat(fields.template_messages(), **fields.rendering())
        reply_of = partial(ChatReply, prompt_token_ids=prompt if fields.return_token_ids else None)
        return generate(state, engine, fields, [prompt], id_prefix=ID_PREFIX, reply_of=reply_of)

    @routes.post("/v1/chat/completions/input_tokens")
    def count_tokens() -> Response:
        engine = state.engine
        fields = request_fields(ChatRequest)
        prompt = engine.render_chat(fields.template_messages(), **fields.rendering())
        return json_response({"input_tokens": len(prompt)})

    return routes
