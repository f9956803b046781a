"""What bytes a token adds to the text, read off a tokenizer's decoder.

Two families of vocabularies are understood. *Byte-level* ones (GPT-2 and its successors) spell every byte as one
printable character; *SentencePiece* ones write a space as U+2581 and a lone byte as ``<0xNN>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from pocketllm.errors import CheckpointError

SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _gpt2_byte_table() -> dict[str, int]:
    """GPT-2's bijection of characters and bytes: 188 bytes stand for themselves, 68 are moved to U+0100 and up.

    Source: ``bytes_to_unicode`` of the GPT-2 release. 0xAD (soft hyphen) is among the 68: it is not printable.
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(themselves)]
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


BYTE_OF_CHARACTER = _gpt2_byte_table()


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token.

    Attributes:
        table: bytes by token id; empty for ids that no token has.
        strips_leading_space: the decoder drops one space from the start of a whole text (SentencePiece's dummy
            prefix), which the bytes of a single token cannot show.
    """

    table: list[bytes]
    strips_leading_space: bool


def token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """Compute the byte table of `backend`; CheckpointError when its decoder is of neither family."""
    parts = list(_decoder_parts(json.loads(backend.to_str())["decoder"]))
    kinds = {part["type"] for part in parts}
    added = backend.get_added_tokens_decoder()
    spell: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        spell = _byte_level_bytes
    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        spell = _sentencepiece_bytes if "ByteFallback" in kinds else _spaced_bytes
    else:
        raise CheckpointError(
            f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported: "
            "byte-level BPE and SentencePiece-style vocabularies are."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        # An added token of a byte-level vocabulary is written as it is read; it never went through the byte table.
        table[token] = text.encode() if token in added and spell is _byte_level_bytes else spell(text)
    return TokenBytes(table, any(_strips_leading_space(part) for part in parts))


def _decoder_parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_parts(part)
    else:
        yield decoder


def _strips_leading_space(part: dict[str, Any]) -> bool:
    if part["type"] == "Strip":
        return bool(part["content"] == " " and part["start"] > 0)
    return bool(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:  # not spelled in the byte alphabet: the text itself, as the byte-level decoder does
        return text.encode()


def _spaced_bytes(text: str) -> bytes:
    return text.replace(SENTENCEPIECE_SPACE, " ").encode()


def _sentencepiece_bytes(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else _spaced_bytes(text)
