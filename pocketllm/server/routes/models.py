"""``GET /v1/models``."""

from __future__ import annotations

from flask import Blueprint, Response

from pocketllm.protocol.errors import NotFoundError
from pocketllm.protocol.openai.models import ServedModel, model_body, model_list
from pocketllm.server.respond import json_response
from pocketllm.server.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The routes that say which model is served."""
    routes = Blueprint("models", __name__)

    @routes.get("/v1/models")
    def list_models() -> Response:
        return json_response(model_list(_served(state)))

    @routes.get("/v1/models/<path:model_id>")
    def show_model(model_id: str) -> Response:
        model = _served(state)
        if model_id not in model.aliases:
            raise NotFoundError(f"The model {model_id!r} is not served here: this server has {model.id!r}.")
        return json_response(model_body(model))

    return routes


def _served(state: ServerState) -> ServedModel:
    engine = state.engine
    return ServedModel(
        id=state.model_id(engine),
        aliases=state.args.aliases or (engine.model_id,),
        created=engine.created,
        family=engine.capabilities.model_type,
        context_window=engine.capabilities.max_model_len,
        trained_context=engine.config.context_length,
        vocab_size=engine.config.vocab_size,
        hidden_size=engine.config.hidden_size,
        parameters=engine.capabilities.details.get("parameters"),
        weight_bytes=engine.capabilities.details.get("weight_bytes"),
    )
