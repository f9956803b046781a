"""``GET /health``, ``/alive`` and ``/ready``: is the process up, does the model serve."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flask import Blueprint, Response

from pocketllm.protocol.errors import ModelUnavailableError, error_reply
from pocketllm.server.respond import json_response
from pocketllm.server.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The routes for supervisors and load balancers."""
    routes = Blueprint("health", __name__)

    @routes.get("/health")
    @routes.get("/v1/health")
    def health() -> Response:
        try:
            engine = state.live_engine
        except ModelUnavailableError as error:
            return _unavailable(state, error)
        counters = asdict(engine.statistics())
        del counters["alive"], counters["error"]
        busy = counters["running"] + counters["waiting"] > 0
        window = engine.capabilities.max_model_len
        return json_response({"status": "ok", "busy": busy, **counters, "context_length": window})

    @routes.get("/alive")
    def alive() -> Response:
        return json_response({"status": "alive"})

    @routes.get("/ready")
    def ready() -> Response:
        try:
            _ = state.live_engine
        except ModelUnavailableError as error:
            return _unavailable(state, error)
        return json_response({"status": "ready"})

    return routes


def _unavailable(state: ServerState, error: ModelUnavailableError) -> Response:
    """The body that llama-server's clients poll for, with how far loading is beside it."""
    reply = error_reply(error)
    body: dict[str, Any] = {"error": {"message": str(error), "type": "unavailable_error", "code": reply.status}}
    if state.loading and state.progress is not None:
        body["progress"] = asdict(state.progress)
    return json_response(body, reply.status, reply.headers)
