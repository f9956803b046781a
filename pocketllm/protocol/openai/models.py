"""The list of models: OpenAI's ``data`` and, for clients of Ollama, ``models``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client learns of the model.

    Attributes:
        id: the name that replies carry.
        aliases: every name that it answers to.
        created: Unix time in seconds.
        family: its model_type.
        context_window: most tokens of one request, prompt and reply together.
        trained_context: tokens that the checkpoint was made for.
        vocab_size: entries of the vocabulary.
        hidden_size: width of the residual stream.
        parameters: numbers in the checkpoint's tensors, or None where that is not known.
        weight_bytes: bytes of the tensors as they are stored, or None.
    """

    id: str
    aliases: Sequence[str]
    created: int
    family: str
    context_window: int
    trained_context: int
    vocab_size: int
    hidden_size: int
    parameters: int | None = None
    weight_bytes: int | None = None


def model_body(model: ServedModel) -> dict[str, Any]:
    """The model as OpenAI describes one; ``meta`` has llama-server's names for its numbers."""
    meta = {
        "n_ctx": model.context_window,
        "n_ctx_train": model.trained_context,
        "n_vocab": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_params": model.parameters,
        "size": model.weight_bytes,
    }
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "pocketllm",
        "aliases": list(model.aliases),
        "tags": [],
        "meta": {name: value for name, value in meta.items() if value is not None},
    }


def model_list(model: ServedModel) -> dict[str, Any]:
    """Both lists, with the one model that is served."""
    return {"object": "list", "data": [model_body(model)], "models": [_ollama_body(model)]}


def _ollama_body(model: ServedModel) -> dict[str, Any]:
    """The model as Ollama lists one; what is not known stays empty, because its clients expect the member."""
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "",
            "family": model.family,
            "families": [model.family],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
