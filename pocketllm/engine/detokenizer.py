"""Token ids to text, piece by piece, so that a character is never split."""

from __future__ import annotations

import codecs

from pocketllm.checkpoint.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing token sequence.

    Bytes that cannot become a character any more turn into U+FFFD at once; bytes that still can are kept back until
    the rest arrives, and are never shown if it does not.

    Control tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to the text."""
        return b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)

    def add(self, token_id: int) -> tuple[str, int]:
        """The characters that the token completes, and how many of them are not its own.

        Those are the replacements of earlier tokens' bytes that this one shows to be no character.
        """
        data = self.bytes_of(token_id)
        foreign = self._given_up(data[:1])
        return self._decoder.decode(data), foreign

    def _given_up(self, next_byte: bytes) -> int:
        """Replacement characters that stand for the bytes kept back, when `next_byte` does not go on with them."""
        kept = self._decoder.getstate()[0]
        if not kept or not next_byte:
            return 0
        trial = codecs.getincrementaldecoder("utf-8")("replace")
        text = trial.decode(kept + next_byte)
        begins_anew = bool(trial.getstate()[0])
        if not text or (not begins_anew and text == (kept + next_byte).decode("utf-8", "ignore")):
            return 0
        return len(text) - (not begins_anew)

    def finish(self) -> str:
        """What is left when no further token comes: nothing, unless bytes were kept that no rest could complete.

        Python's decoder keeps half a surrogate (ED A0 to ED BF) as if it could become a character.
        """
        kept = self._decoder.getstate()[0]
        impossible = kept[:1] == b"\xed" and kept[1:2] >= b"\xa0"
        return self._decoder.decode(b"", final=True) if impossible else ""
