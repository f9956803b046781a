"""From an exception to the status and the body that a client gets, in OpenAI's envelope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pocketllm.errors import (
    EngineDeadError,
    InvalidRequestError,
    PocketLLMError,
    QueueFullError,
    TemplateError,
    UnsupportedFeatureError,
)

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Code of the error for a prompt and reply that do not fit the window."""
REQUEST_ID_ACTIVE = "request_id_active"
"""Code of the error for an id that another request holds while it runs."""

_TYPES = {404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error", 504: "timeout_error"}


class NotFoundError(PocketLLMError):
    """There is no such thing here: a model, or a request that could be cancelled."""


class ModelUnavailableError(PocketLLMError):
    """The model cannot serve.

    Attributes:
        retry_after: seconds after which another try is sensible, or None when none is.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(PocketLLMError):
    """The time that a request was given ran out."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it is sent.

    Attributes:
        status: of HTTP.
        body: a JSON object.
        headers: further headers of the response.
    """

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def error_reply(error: Exception) -> ErrorReply:
    """What a client is told of `error`; an exception that nobody planned says nothing of its inside."""
    message = str(error)
    match error:
        case InvalidRequestError():
            status = 409 if error.code == REQUEST_ID_ACTIVE else 400
            return openai_error(status, message, param=error.param, code=error.code, details=error.details)
        case TemplateError():
            return openai_error(400, message, param="messages")
        case UnsupportedFeatureError():
            return openai_error(400, message)
        case NotFoundError():
            return openai_error(404, message)
        case QueueFullError():
            return openai_error(429, message, code="queue_full", headers={"Retry-After": str(error.retry_after)})
        case ModelUnavailableError():
            wait = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
            return openai_error(503, message, code=503, headers=wait)
        case EngineDeadError():
            return openai_error(503, message, code=503)
        case RequestTimeoutError():
            return openai_error(504, message)
        case PocketLLMError():
            return openai_error(500, message)
    return openai_error(500, "The server met an unexpected error; its log says more.")


def openai_error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | int | None = None,
    details: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> ErrorReply:
    """OpenAI's envelope: ``{"error": {message, type, param, code}}`` and what `details` adds."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code, **(details or {})}
    return ErrorReply(status, {"error": error}, headers or {})


def llama_server_error(reply: ErrorReply) -> ErrorReply:
    """The same error in llama-server's envelope: ``{"error": {code, message, type}}``, the code being the status."""
    error = dict(reply.body["error"])
    reason, _ = error.pop("code"), error.pop("param")
    kind = "exceed_context_size_error" if reason == CONTEXT_LENGTH_EXCEEDED else error["type"]
    kind = "not_supported_error" if reply.status == 501 else kind
    return ErrorReply(reply.status, {"error": {"code": reply.status, **error, "type": kind}}, reply.headers)
