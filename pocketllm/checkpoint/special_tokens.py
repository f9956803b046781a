"""Keeping text that merely looks like a special token from becoming one.

A chat prompt mixes two kinds of text: what the template wrote, whose special tokens are genuine, and what the
messages contain, which must stay ordinary text whatever it says. Rendering joins them into one string. So before
rendering, every special token's text inside a message is *marked* with a character that occurs nowhere else; after
it, the marks become `RenderedPrompt.breaks`: positions that no special token may span. A prompt without breaks is
encoded as it stands, so ordinary content costs nothing and changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

# Unicode sets these 32 code points aside for the internal use of programs; text meant for others has none of them.
NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_STAND_IN_START, _STAND_IN_END = NONCHARACTERS[0], NONCHARACTERS[1]
_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which no encoding can carry. The length stays the same."""
    return _SURROGATE.sub("\ufffd", text)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation.

    Attributes:
        text: the prompt.
        breaks: ascending offsets into `text`. A special token's text that has one strictly inside came from a
            message and is ordinary text.
    """

    text: str
    breaks: tuple[int, ...] = ()


class SpecialTokens:
    """The texts of a tokenizer's special tokens, and where they occur."""

    def __init__(self, texts: Collection[str]) -> None:
        # A token of one character has no inside for a break, so its text in a message stays what it is.
        self.texts = frozenset(text for text in texts if len(text) > 1)
        longest_first = "|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))) or "(?!)"
        self._match = re.compile(longest_first)
        self._start = re.compile(f"(?=(?:{longest_first}))(.)", re.DOTALL)

    def occurs_in(self, text: str) -> bool:
        """Whether some special token's text is part of `text`."""
        return self._match.search(text) is not None

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark` after the first character of every occurrence, overlapping ones included."""
        return self._start.sub(lambda start: start[1] + mark, text)

    def breaks_in(self, text: str) -> tuple[int, ...]:
        """The breaks by which no special token's text in `text` is one."""
        return tuple(start.end(1) for start in self._start.finditer(text))

    def replace_unbroken(self, prompt: RenderedPrompt, names: Mapping[str, str]) -> str:
        """The prompt's text, with the genuine special tokens under their other `names`."""
        pieces, position = [], 0
        for end in (*prompt.breaks, len(prompt.text)):
            piece = prompt.text[position:end]
            pieces.append(self._match.sub(lambda token: names[token[0]], piece))
            position = end
        return "".join(pieces)


def unmark(text: str, mark: str) -> RenderedPrompt:
    """Turn the marks of a rendered text into breaks."""
    pieces = text.split(mark)
    breaks, offset = [], 0
    for piece in pieces[:-1]:
        offset += len(piece)
        breaks.append(offset)
    return RenderedPrompt("".join(pieces), tuple(breaks))


def unused_noncharacter(texts: Iterable[str]) -> str | None:
    """A noncharacter that occurs in none of `texts`, or None when they use up all of them."""
    free = set(NONCHARACTERS)
    for text in texts:
        free.difference_update(text)
    return min(free, default=None)


class InertEncoder:
    """A copy of a tokenizer that knows each special token under a private name only.

    Because the copy has no token of the original text, neither the search for added tokens nor any sequence of merges
    can produce a special token from ordinary text; splitting, normalisation and stripping stay those of the original.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[str, int]) -> None:
        self._special = SpecialTokens(special)
        self._names = {text: f"{_STAND_IN_START}{special[text]:x}{_STAND_IN_END}" for text in self._special.texts}
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(self._rename(json.loads(backend.to_str()))))

    def _rename(self, description: dict[str, Any]) -> dict[str, Any]:
        names, model = self._names, description["model"]
        for token in description["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
        else:  # a unigram model lists (piece, score)
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not self._touches_special(merge)]
        return description

    def _touches_special(self, merge: str | list[str]) -> bool:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        return not self._names.keys().isdisjoint((left, right, left + right))

    def encode(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of `prompt`, its genuine special tokens included, the rest as ordinary text.

        U+FDD0, with which the private names begin, is read as U+FFFD.
        """
        text = prompt.text.replace(_STAND_IN_START, "\ufffd")
        text = self._special.replace_unbroken(RenderedPrompt(text, prompt.breaks), self._names)
        return encoded(self._backend, text)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of `text`, in which nothing is a special token."""
        return encoded(self._backend, text.replace(_STAND_IN_START, "\ufffd"))


def encoded(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """The ids of a text, nothing added. Other threads run meanwhile: the library lets go of Python only for batches."""
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
