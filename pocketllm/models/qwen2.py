"""qwen2: Qwen 2 and 2.5: biases on q, k and v, and an optional sliding window from some layer on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.models.config_reader import ConfigReader
from pocketllm.models.dense_decoder import (
    DecoderConfig,
    build,
    cache_layout,
    config_from_gguf,
    config_from_hf,
    unread_tensors,
    weights,
)
from pocketllm.models.family import Naming

__all__ = ["build", "cache_layout", "parse_config", "tiny_config", "unread_tensors", "weights"]

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}


def parse_config(naming: Naming, raw: Mapping[str, Any]) -> DecoderConfig:
    """See `Family.parse_config`."""
    if naming == "gguf":
        return config_from_gguf(raw, "qwen2", qkv_bias=True)
    return config_from_hf(ConfigReader(raw), "qwen2", _DEFAULTS, windowed=True, qkv_bias=True)


def tiny_config() -> dict[str, Any]:
    """See `Family.tiny_config`."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 1,
        "eos_token_id": 2,
    }
