"""The errors that cross PocketLLM's boundaries.

Every message says what was wrong, why, and what to do about it. `ValueError` stays the base of everything that a
caller's argument can cause, so that code written against the standard library keeps working.
"""

from __future__ import annotations

_SHOWN_CHARACTERS = 100


def shortened(text: str) -> str:
    """A name that a user gave, of any length, for a message of one line."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


class PocketLLMError(Exception):
    """Base of every error that PocketLLM raises on purpose."""


class CheckpointError(PocketLLMError, ValueError):
    """A checkpoint is damaged, incomplete or not understood; the message names the file and the tensor or key."""


class ModelNotFoundError(PocketLLMError, FileNotFoundError):
    """No model of that name, path or id is at hand; the message lists where it was looked for."""


class UnsupportedFeatureError(PocketLLMError):
    """A backend lacks something that was asked for; the message names the feature and who has it."""


class ConfigurationError(PocketLLMError, ValueError):
    """A flag, environment variable or configuration key has a value that cannot be used."""


class TemplateError(PocketLLMError, ValueError):
    """A chat template refused the conversation, could not be rendered, or tried what the sandbox forbids."""


class InvalidRequestError(PocketLLMError, ValueError):
    """A request field is wrong.

    Attributes:
        param: path of the field, such as ``messages.0.content``, or None when no single field is at fault.
        code: a machine-readable reason, such as ``context_length_exceeded``, or None.
        details: further members for the error body, such as ``n_prompt_tokens``.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.details = details or {}


class QueueFullError(PocketLLMError):
    """The engine's queue is at its limit.

    Attributes:
        retry_after: seconds after which another try is sensible.
    """

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(PocketLLMError, RuntimeError):
    """A step failed; the requests that took part in it end with this error, and the engine serves on."""


class EngineDeadError(EngineError):
    """The engine can serve no further request; it has to be started anew."""
