"""PocketLLM: JIT-compiled kernels, runtimes and a small server for language models.

Importing the package loads neither an array library nor a compiler; the names below arrive when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pocketllm.async_llm import AsyncLLM
    from pocketllm.config import EngineArgs
    from pocketllm.errors import (
        CheckpointError,
        ConfigurationError,
        EngineDeadError,
        EngineError,
        InvalidRequestError,
        ModelNotFoundError,
        PocketLLMError,
        QueueFullError,
        TemplateError,
        UnsupportedFeatureError,
    )
    from pocketllm.llm import LLM
    from pocketllm.types import (
        Capabilities,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        ScoreOutput,
        TokenEvent,
        TokenLogprob,
        Usage,
    )

__version__ = "0.1.0"

_HOMES = {
    "pocketllm.async_llm": ("AsyncLLM",),
    "pocketllm.config": ("EngineArgs",),
    "pocketllm.errors": (
        "CheckpointError",
        "ConfigurationError",
        "EngineDeadError",
        "EngineError",
        "InvalidRequestError",
        "ModelNotFoundError",
        "PocketLLMError",
        "QueueFullError",
        "TemplateError",
        "UnsupportedFeatureError",
    ),
    "pocketllm.llm": ("LLM",),
    "pocketllm.types": (
        "Capabilities",
        "CompletionOutput",
        "RequestOutput",
        "SamplingParams",
        "ScoreOutput",
        "TokenEvent",
        "TokenLogprob",
        "Usage",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Capabilities",
    "CheckpointError",
    "CompletionOutput",
    "ConfigurationError",
    "EngineArgs",
    "EngineDeadError",
    "EngineError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "PocketLLMError",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "TemplateError",
    "TokenEvent",
    "TokenLogprob",
    "UnsupportedFeatureError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
