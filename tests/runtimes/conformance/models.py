"""Models of a few thousand weights, made from the families' own descriptions, and runtimes loaded with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.kernels.checking.arrays import backend
from pocketllm.models.family import family
from pocketllm.runtimes.base import Runtime, RuntimeOptions
from pocketllm.runtimes.registry import BACKENDS

BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a walk's models and contexts are.

    Attributes:
        sizes: of the models.
        usual, longest: tokens that most contexts have at their end, and that some have.
        blocks, slots: of the memory that contexts share; too few for all of them, so that it is handed on.
        sequences: that live at a time.
        together: the most that run in one step.
        chunk: the most rows of one in a step.
        drafts: the most draft rows of one in a step.
        layers: for each kind of layer, how many the models have.
        value_heads: of linear layers, which have one key head.
        segment: token lists differ from each other by whole segments of so many tokens. The number of different lists,
            each of which takes a serial run, grows with their number.
    """

    sizes: Mapping[str, int]
    usual: int
    longest: int
    blocks: int
    slots: int
    sequences: int
    together: int
    chunk: int
    drafts: int
    layers: int
    value_heads: int
    segment: int


SMALL = Scale(
    {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24},
    usual=9,
    longest=9,
    blocks=24,
    slots=16,
    sequences=5,
    together=2,
    chunk=3,
    drafts=3,
    layers=1,
    value_heads=1,
    segment=3,
)
"""For runtimes whose kernels are interpreted or emulated."""

WIDE = Scale(
    {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384},
    usual=40,
    longest=280,
    blocks=240,
    slots=32,
    sequences=8,
    together=5,
    chunk=90,
    drafts=5,
    layers=2,
    value_heads=2,
    segment=1,
)
"""Contexts longer than the segments in which kernels reduce keys, and products that threads share."""

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def _of_family(model_type: str, scale: Scale) -> dict[str, Any]:
    """What makes a family's walks harder: angles that depend on the length fixed at admission, windows, states."""
    dense = _HEADS | {"num_hidden_layers": scale.layers}
    windowed = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": scale.layers // 2}
    kinds = ["linear_attention", "full_attention"] * scale.layers
    families: dict[str, dict[str, Any]] = {
        "llama": dense | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "qwen2": dense | windowed,
        "qwen3": dense | windowed,
        "qwen3_5": _HEADS
        | {
            "num_hidden_layers": len(kinds),
            "layer_types": kinds,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": scale.value_heads,
        },
    }
    return families.get(model_type, {})


def scale_for(backend_name: str) -> Scale:
    """The largest that is worth its time: PyTorch's plain operations have no segments, and are slow row by row."""
    return SMALL if backend_name == "torch" or backend(backend_name).emulator is not None else WIDE


def save_model(model_type: str, scale: Scale, folder: Path) -> Path:
    """A checkpoint with random weights."""
    raw = family(model_type).tiny_config() | scale.sizes | _of_family(model_type, scale)
    raw["max_position_embeddings"] = scale.longest
    # With the usual 1e-6 a norm magnifies the rounding of a row that happens to be small a thousandfold.
    raw["rms_norm_eps"] = 1e-2
    specs = family(model_type).weights(family(model_type).parse_config("hf", raw), "hf")
    rng = np.random.default_rng(20260301)
    tensors = {}
    for name, shape in {spec.stored_as: spec.stored_shape for spec in specs}.items():
        values = rng.standard_normal(shape)
        values = 1 + values / 4 if len(shape) == 1 else values / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def load(backend_name: str, folder: Path, threads: int | None = None) -> Runtime:
    """A runtime with the checkpoint's weights, in float32; memory is the caller's to allocate."""
    options = RuntimeOptions(
        device=backend(backend_name).device, dtype="float32", block_size=BLOCK_SIZE, threads=threads
    )
    with open_checkpoint(folder) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        runtime_class = BACKENDS[backend_name].load()
        reasons = runtime_class.supports(config, options)
        if reasons:
            raise ValueError(f"backend {backend_name} cannot run {checkpoint.model_type}: {'; '.join(reasons)}")
        runtime = runtime_class(config, options)
        runtime.load(checkpoint, lambda *_: None)
    return runtime
