"""Which token ids end a reply, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.errors import CheckpointError, ConfigurationError
from pocketllm.models.family import ModelConfig

# GGUF metadata names one end-of-sequence id; chat models end a turn or a document with any of these control tokens.
_END_TOKENS = frozenset(
    {
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
    }
)


def end_token_ids(
    options: Mapping[str, Any], checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer
) -> tuple[frozenset[int], str]:
    """The end-of-sequence ids and where they come from.

    The first that has any decides: the option ``eos_token_id``, ``generation_config.json``, the configuration (for
    GGUF its metadata and the vocabulary's end-of-turn tokens), the tokenizer. ``none`` when nobody has one.
    """
    ids, source = _first_named(options, checkpoint, config, tokenizer)
    if max(ids, default=0) >= config.vocab_size:
        error = ConfigurationError if source == "backend_options" else CheckpointError
        raise error(
            f"end-of-sequence id {max(ids)} (from {source}) is outside the vocabulary of {config.vocab_size} tokens"
        )
    return ids, source


def _first_named(
    options: Mapping[str, Any], checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer
) -> tuple[frozenset[int], str]:
    if "eos_token_id" in options:
        return _ids(options["eos_token_id"], ConfigurationError, "backend option eos_token_id"), "backend_options"
    if checkpoint.generation_config.get("eos_token_id") not in (None, []):
        value = checkpoint.generation_config["eos_token_id"]
        return _ids(value, CheckpointError, "generation_config.json: eos_token_id"), "generation_config"
    named = frozenset(config.eos_token_ids) if checkpoint.naming == "hf" else _from_vocabulary(tokenizer)
    if named:
        return named, "config"
    declared = frozenset(tokenizer.eos_token_ids)
    return declared, "tokenizer" if declared else "none"


def _from_vocabulary(tokenizer: Tokenizer) -> frozenset[int]:
    ends = {i for i in tokenizer.special_ids if tokenizer.token_text(i) in _END_TOKENS}
    return frozenset(ends.union(tokenizer.eos_token_ids))


def _ids(value: object, error: type[Exception], where: str) -> frozenset[int]:
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise error(f"{where} is {value!r}: give a token id or a list of token ids")
    return frozenset(ids)
