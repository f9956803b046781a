"""The Flask application."""

from __future__ import annotations

import logging

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from pocketllm.errors import PocketLLMError
from pocketllm.protocol.errors import ErrorReply, error_reply, llama_server_error, openai_error
from pocketllm.server import access_log
from pocketllm.server.respond import json_response
from pocketllm.server.routes import chat, completions, health, models, requests, tokenization
from pocketllm.server.state import ServerState

log = logging.getLogger(__name__)

MEGABYTE = 10**6


def create_app(state: ServerState) -> Flask:
    """The application over `state`; it serves before a model is loaded, and says so."""
    app = Flask("pocketllm", static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # an answer to OPTIONS would mean something to a browser
    app.config["MAX_CONTENT_LENGTH"] = int(state.args.max_body_mb * MEGABYTE)
    # A path is served as it stands or not at all: no redirects between spellings.
    app.url_map.strict_slashes = True
    app.url_map.merge_slashes = False
    for routes in (chat, completions, health, models, requests, tokenization):
        app.register_blueprint(routes.blueprint(state))
    access_log.install(app, state.access_log)
    app.register_error_handler(PocketLLMError, _error_response)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected_error)
    return app


def _in_envelope(reply: ErrorReply) -> Response:
    """An error as clients of the path expect it: OpenAI's under /v1/, llama-server's elsewhere."""
    if not request.path.startswith("/v1/"):
        reply = llama_server_error(reply)
    return json_response(reply.body, reply.status, reply.headers)


def _error_response(error: Exception) -> Response:
    return _in_envelope(error_reply(error))


def _http_error(error: HTTPException) -> Response:
    """Flask's own refusals in the envelope of all others."""
    return _in_envelope(_http_error_reply(error))


def _http_error_reply(error: HTTPException) -> ErrorReply:
    path = request.path[:200]
    if isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        message = f"{path} does not take {request.method}: it takes {allowed}."
        return openai_error(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if error.code == 404:
        return openai_error(404, f"There is no {path} here.", code="unknown_path")
    return openai_error(error.code or 500, error.description or "The request cannot be served.")


def _unexpected_error(error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return _error_response(error)
