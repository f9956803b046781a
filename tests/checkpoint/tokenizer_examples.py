"""Small tokenizers, trained on the spot, as a Hugging Face directory or as GGUF metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The harbour was quiet before sunrise, and the boats lay still.",
    "def total(items):\n    return sum(item.price for item in items)\n",
    "1234 5678 90 12, 3.14159; don't DON'T it's we're they'll I'd",
    "na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f60a",
] * 3
SPECIAL = ("<|end|>", "<|start|>", "<|stop|>")
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|stop|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def train_byte_level(splitter: Any = None, size: int = 420) -> tokenizers.Tokenizer:
    """A byte-level BPE with three special tokens and an ordinary added one, its ids from 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def write_directory(directory: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    """Save `tokenizer` as a checkpoint directory does."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|stop|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_level_metadata(tokenizer: tokenizers.Tokenizer, pre: str, **keys: Any) -> dict[str, Any]:
    """`tokenizer` as ``tokenizer.ggml.*`` metadata."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    texts = {id_: text for text, id_ in tokenizer.get_vocab(with_added_tokens=True).items()}
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [texts[id_] for id_ in range(len(texts))],
        "token_type": [1 if id_ not in added else 3 if added[id_].special else 4 for id_ in range(len(texts))],
        "merges": [" ".join(merge) for merge in model["merges"]],
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentencepiece_metadata(pieces: Sequence[str], scores: Sequence[float] | None = None, **keys: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: unknown, BOS, EOS, the 256 bytes, then `pieces`, best score first unless given."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 259 + list(scores or [-float(rank) for rank in range(len(pieces))]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def golden_directories() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The golden checkpoint directories, where POCKETLLM_FIXTURES names a place with some, and their tokenizer data."""
    root = os.environ.get("POCKETLLM_FIXTURES")
    for file in sorted(Path(root).glob("tiny/*/golden.json")) if root else ():
        yield file.parent, json.loads(file.read_text(encoding="utf-8"))["tokenizer"]
