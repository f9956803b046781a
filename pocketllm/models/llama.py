"""llama: Llama 1 to 3, SmolLM2, and the many models that share their configuration."""

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
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def parse_config(naming: Naming, raw: Mapping[str, Any]) -> DecoderConfig:
    """See `Family.parse_config`."""
    if naming == "gguf":
        # GGUF's converters store llama's q and k for rotation in neighbouring pairs.
        return config_from_gguf(raw, "llama", paired_qk=True)
    reader = ConfigReader(raw)
    reader.expect("rope_interleaved", (False,), False)
    reader.ignore("is_llama_config")
    bias = reader.flag("attention_bias")
    mlp_bias = reader.flag("mlp_bias")
    return config_from_hf(reader, "llama", _DEFAULTS, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def tiny_config() -> dict[str, Any]:
    """See `Family.tiny_config`."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
