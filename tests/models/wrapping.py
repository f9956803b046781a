"""A saved qwen3_5 as the text part of a multimodal checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def wrapped(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration as multimodal checkpoints write it."""
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 310,
        "vision_config": {"depth": 2, "hidden_size": 32},
        "tie_word_embeddings": raw["tie_word_embeddings"],
        "text_config": raw,
    }


def wrap_checkpoint(folder: Path, **outer: Any) -> dict[str, Any]:
    """Rewrite a saved text model, with further keys beside its `text_config`, which is returned."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(wrapped(config) | outer))
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    save_file(renamed | {"model.visual.patch_embed.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return config
