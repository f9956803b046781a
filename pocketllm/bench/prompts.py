"""The text that benchmarks read: original English and code, the same for every engine."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.checkpoint.tokenizer import load_tokenizer


def text() -> str:
    """The text that lies beside this module, about 1,800 tokens."""
    return (files("pocketllm.bench") / "data" / "text.txt").read_text(encoding="utf-8")


def tokens(path: Path, content: str) -> list[int]:
    """A text in the tokens of the checkpoint at `path`, without special ones."""
    with open_checkpoint(path) as checkpoint:
        return load_tokenizer(checkpoint).encode(content, add_special_tokens=False)


def passages(token_ids: list[int], count: int, length: int) -> list[list[int]]:
    """`count` passages of `length` tokens, evenly spread over the text, which repeats where it is too short.

    Each begins at another place, so that no cache of prefixes shortens the work.
    """
    step = max(1, len(token_ids) // count)
    repeated = token_ids * (1 + (step * count + length) // len(token_ids))
    return [repeated[place : place + length] for place in range(0, step * count, step)]
