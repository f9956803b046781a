from __future__ import annotations

import pytest

from pocketllm.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    TemplateError,
    UnsupportedFeatureError,
)
from pocketllm.protocol.errors import ModelUnavailableError, NotFoundError, RequestTimeoutError, error_reply


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("m"), 400, "invalid_request_error"),
        (InvalidRequestError("m", code="request_id_active"), 409, "invalid_request_error"),
        (TemplateError("m"), 400, "invalid_request_error"),
        (UnsupportedFeatureError("m"), 400, "invalid_request_error"),
        (NotFoundError("m"), 404, "not_found_error"),
        (QueueFullError("m"), 429, "rate_limit_error"),
        (EngineError("m"), 500, "server_error"),
        (EngineDeadError("m"), 503, "unavailable_error"),
        (ModelUnavailableError("m"), 503, "unavailable_error"),
        (RequestTimeoutError("m"), 504, "timeout_error"),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, kind: str) -> None:
    reply = error_reply(error)
    assert reply.status == status
    assert reply.body["error"]["type"] == kind
    assert reply.body["error"]["message"] == "m"
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}


def test_an_unplanned_error_keeps_its_inside() -> None:
    reply = error_reply(KeyError("secret"))
    assert reply.status == 500
    assert "secret" not in str(reply.body)


def test_details_stand_beside_the_message() -> None:
    details = {"n_prompt_tokens": 9, "n_ctx": 8}
    error = InvalidRequestError("m", param="prompt", code="context_length_exceeded", details=details)
    assert error_reply(error).body["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
        **details,
    }


def test_waits_are_told() -> None:
    assert error_reply(QueueFullError("m", retry_after=3)).headers == {"Retry-After": "3"}
    assert error_reply(ModelUnavailableError("m", retry_after=2)).headers == {"Retry-After": "2"}
