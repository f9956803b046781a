"""``DELETE /v1/requests/<id>``."""

from __future__ import annotations

from flask import Blueprint, Response

from pocketllm.protocol.errors import NotFoundError
from pocketllm.server.respond import json_response
from pocketllm.server.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The routes about running requests."""
    routes = Blueprint("requests", __name__)

    @routes.delete("/v1/requests/<path:request_id>")
    def cancel(request_id: str) -> Response:
        if not state.active.cancel(request_id):
            raise NotFoundError(f"No request with the id {request_id!r} is running: it is unknown, or has finished.")
        return json_response({"id": request_id, "cancelled": True})

    return routes
