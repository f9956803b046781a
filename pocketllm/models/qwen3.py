"""qwen3: Qwen 3's dense models: an RMSNorm for each head on q and k before they are rotated."""

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
    "head_dim": 128,
    "max_position_embeddings": 32768,
}


def parse_config(naming: Naming, raw: Mapping[str, Any]) -> DecoderConfig:
    """See `Family.parse_config`."""
    if naming == "gguf":
        return config_from_gguf(raw, "qwen3", qk_norm=True)
    reader = ConfigReader(raw)
    bias = reader.flag("attention_bias")
    return config_from_hf(reader, "qwen3", _DEFAULTS, windowed=True, qk_norm=True, qkv_bias=bias, output_bias=bias)


def tiny_config() -> dict[str, Any]:
    """See `Family.tiny_config`."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 2,
    }
