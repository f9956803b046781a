"""The control tokens by which code models write what belongs between two given texts.

The scheme, and the order prefix, suffix, middle, are those of Bavarian et al., "Efficient Training of Language Models
to Fill in the Middle" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Token ids: a prompt is `prefix`, the text before, `suffix`, the text after, `middle`."""

    prefix: int
    suffix: int
    middle: int


# The spellings in the vocabularies of the families that were trained with this order.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)


def spelled_tokens(token_id: Callable[[str], int | None]) -> FillInMiddle | None:
    """The tokens of the first spelling that a vocabulary has in full, or None."""
    for spelling in SPELLINGS:
        ids = [token for text in spelling if (token := token_id(text)) is not None]
        if len(ids) == len(spelling):
            return FillInMiddle(*ids)
    return None
