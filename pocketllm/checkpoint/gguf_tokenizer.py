"""A `tokenizers` tokenizer from the ``tokenizer.ggml.*`` keys of GGUF metadata.

Two models exist in the families this project serves: ``gpt2``, byte-level BPE with a list of merges and a named
splitting rule (`PRE_TOKENIZERS`), and ``llama``, SentencePiece's BPE, where the score of a piece is its priority.
The meaning of the keys is fixed by the GGUF specification and by llama.cpp's loader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pocketllm.checkpoint.token_bytes import SENTENCEPIECE_SPACE
from pocketllm.errors import CheckpointError

_log = logging.getLogger(__name__)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BREAKS_AND_SPACES
_LLAMA3 = _CL100K.replace("{DIGITS}", "{1,3}")
_QWEN2 = _CL100K.replace("{DIGITS}", "")
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BREAKS_AND_SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDING|"
_O200K = (
    _CASED_WORD.replace("ENDING", _CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BREAKS_AND_SPACES
)
_TEKKEN = _CASED_WORD.replace("ENDING", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BREAKS_AND_SPACES
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _BREAKS_AND_SPACES,
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into pieces before merging.

    Attributes:
        patterns: regular expressions applied one after another; each match becomes a piece of its own.
        ignore_merges: a piece that is a token as a whole is that token, whatever the merges say.
        add_bos_token: whether BOS comes first when the metadata does not say.
        compose: apply Unicode's NFC first, as the original tokenizer does.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos_token: bool = False
    compose: bool = False


_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos_token=True)
_CL100K_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True)
_QWEN2_RULE = PreTokenizer((_QWEN2,), compose=True)

# ``tokenizer.ggml.pre``: the rule, by the name that llama.cpp's converter gives it.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "exaone4"), _PLAIN_GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3_RULE),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _CL100K_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_RULE),
    "qwen35": PreTokenizer((_QWEN35,), compose=True),
    "gpt-4o": PreTokenizer((_O200K,), ignore_merges=True),
    "minimax-m2": PreTokenizer((_O200K,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos_token=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer and the tokens with a role.

    Attributes:
        backend: the library's tokenizer, without a post-processor.
        tokens: the vocabulary by id.
        ids: token id by role, where declared: ``bos``, ``eos``, ``unknown``, ``padding``, ``eot``, ``eom``, and for
            filling in the middle ``fim_pre``, ``fim_suf``, ``fim_mid``.
        add_bos_token: whether an encoded text begins with BOS.
        add_eos_token: whether it ends with EOS.
    """

    backend: tokenizers.Tokenizer
    tokens: Sequence[str]
    ids: Mapping[str, int]
    add_bos_token: bool
    add_eos_token: bool


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer that `metadata` describes.

    Raises:
        CheckpointError: a key is missing, ill-typed, out of range or at odds with another; the message names it.
    """
    keys = _Keys(metadata)
    model = keys.text("model")
    if model not in _BUILDERS:
        raise CheckpointError(
            f"tokenizer.ggml.model is {model!r}, which is not supported; supported are {', '.join(_BUILDERS)}."
        )
    tokens = keys.array("tokens", str)
    types = _token_types(keys, len(tokens))
    if model == "llama":
        # SentencePiece matches user-defined symbols in the text before it turns spaces into U+2581.
        tokens = [
            token.replace(SENTENCEPIECE_SPACE, " ") if type_ == TokenType.USER_DEFINED else token
            for token, type_ in zip(tokens, types, strict=True)
        ]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for id_, token in enumerate(tokens) if vocabulary[token] != id_)
        raise CheckpointError(f"tokenizer.ggml.tokens lists {twice!r} more than once, so its id is ambiguous.")
    ids = {role: id_ for role in _ROLES if (id_ := keys.token_id(role, len(tokens))) is not None}
    backend, adds_bos = _BUILDERS[model](keys, _Vocabulary(vocabulary, types, ids))
    add_bos = keys.flag("add_bos_token")
    if add_bos and "bos" not in ids:
        raise CheckpointError("tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing.")
    return GgufTokenizer(
        backend=backend,
        tokens=tokens,
        ids=ids,
        add_bos_token=(adds_bos and "bos" in ids) if add_bos is None else add_bos,
        add_eos_token=keys.flag("add_eos_token") or False,
    )


_ROLES = ("bos", "eos", "unknown", "padding", "eot", "eom", "fim_pre", "fim_suf", "fim_mid")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    ids: dict[str, int]
    types: Sequence[TokenType]
    roles: Mapping[str, int]


class _Keys:
    """Typed access to the ``tokenizer.ggml.*`` keys."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, name: str, default: str | None = None) -> str:
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{key} is missing: the file has no tokenizer, or only half of one.")
        if not isinstance(value, str):
            raise CheckpointError(f"{key} should be a string, not {type(value).__name__}.")
        return value

    def flag(self, name: str) -> bool | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and not isinstance(value, bool | np.bool_):
            raise CheckpointError(f"tokenizer.ggml.{name} should be a boolean, not {type(value).__name__}.")
        return None if value is None else bool(value)

    def array(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key)
        if value is None:
            raise CheckpointError(f"{key} is missing: the file has no tokenizer, or only half of one.")
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, kind) for item in items):
            raise CheckpointError(f"{key} should be an array of {kind.__name__}.")
        if length is not None and len(items) != length:
            raise CheckpointError(f"{key} has {len(items)} entries, but tokenizer.ggml.tokens has {length}.")
        return list(items)

    def has(self, name: str) -> bool:
        return f"tokenizer.ggml.{name}" in self._metadata

    def token_id(self, role: str, n_tokens: int) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise CheckpointError(f"{key} should be an integer, not {type(value).__name__}.")
        if not 0 <= value < n_tokens:
            raise CheckpointError(f"{key} is {value}, but the vocabulary has {n_tokens} tokens.")
        return int(value)


def _token_types(keys: _Keys, n_tokens: int) -> list[TokenType]:
    if not keys.has("token_type"):
        return [TokenType.NORMAL] * n_tokens
    try:
        return [TokenType(value) for value in keys.array("token_type", int, n_tokens)]
    except ValueError as error:
        raise CheckpointError(f"tokenizer.ggml.token_type: {error}; known are 1 to 6.") from error


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Declare control tokens special and user-defined ones plain added tokens; all keep their ids."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = [
        AddedToken(token, special=type_ in special, normalized=False)
        for (token, _), type_ in zip(vocabulary.ids.items(), vocabulary.types, strict=True)
        if token and type_ in (*special, TokenType.USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _build_byte_level(keys: _Keys, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    if not keys.has("pre"):
        _log.warning("tokenizer.ggml.pre is missing: text is split as GPT-2 does, which may not suit this model.")
    name = keys.text("pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, a splitting rule that is not known here; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}."
        )
    merges = []
    for rank, merge in enumerate(keys.array("merges", str)):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.ids.keys():
            raise CheckpointError(f"tokenizer.ggml.merges[{rank}], {merge!r}, does not join two tokens to a third.")
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=rule.ignore_merges))
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary)
    return backend, rule.add_bos_token


def _build_sentencepiece(keys: _Keys, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    scores = keys.array("scores", float, len(vocabulary.ids))
    unknown = vocabulary.roles.get("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges_from_scores(vocabulary.ids, vocabulary.types, scores),
            unk_token=None if unknown is None else list(vocabulary.ids)[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        )
    )
    spaces = normalizers.Replace(" ", SENTENCEPIECE_SPACE)
    decoding = [decoders.Replace(SENTENCEPIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("add_space_prefix") is False:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(decoding)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SENTENCEPIECE_SPACE), spaces])
        backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)])
    _add_tokens(backend, vocabulary)
    return backend, True


def merges_from_scores(
    vocabulary: Mapping[str, int], types: Sequence[TokenType], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges, best first, by which ranked BPE does what SentencePiece does with scores.

    SentencePiece joins, again and again, the adjacent pair whose concatenation is the best-scored piece. So every
    way to cut a piece into two pieces is a merge of that piece's priority; its cuts follow each other in the order of
    their parts' ids. Control, unknown, user-defined and byte pieces never come out of merging.
    """
    pieces = {piece: id_ for piece, id_ in vocabulary.items() if types[id_] == TokenType.NORMAL}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for piece, id_ in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[id_], id_, pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


_BUILDERS: Mapping[str, Callable[[_Keys, _Vocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
}
