"""``POST /v1/chat/completions``."""

from __future__ import annotations

from flask import Blueprint, Response

from pocketllm.protocol.openai.chat import ID_PREFIX, ChatReply, ChatRequest
from pocketllm.server.answering import generate, request_fields
from pocketllm.server.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The routes of chat completions."""
    routes = Blueprint("chat", __name__)

    @routes.post("/v1/chat/completions")
    def chat() -> Response:
        engine = state.engine
        fields = request_fields(ChatRequest)
        prompt = engine.render_chat(
            fields.template_messages(),
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_variables=fields.chat_template_kwargs,
        )
        return generate(state, engine, fields, [prompt], id_prefix=ID_PREFIX, reply_of=ChatReply)

    return routes
