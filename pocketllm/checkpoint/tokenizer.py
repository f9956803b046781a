"""Text to token ids and back, over the `tokenizers` library, for Hugging Face directories and GGUF metadata alike."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.fill_in_middle import FillInMiddle, spelled_tokens
from pocketllm.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from pocketllm.checkpoint.json_objects import read_json_object
from pocketllm.checkpoint.mapped import MappedFile
from pocketllm.checkpoint.special_tokens import (
    InertEncoder,
    RenderedPrompt,
    SpecialTokens,
    encoded,
    replace_surrogates,
)
from pocketllm.checkpoint.token_bytes import TokenBytes, token_bytes
from pocketllm.errors import CheckpointError

# The keys under which tokenizer_config.json and special_tokens_map.json name tokens, and templates ask for them.
_ROLE_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

MOST_TOKENS = 1 << 22
"""No vocabulary comes near; tables by token id stay small."""


class Tokenizer:
    """A checkpoint's tokenizer. It is safe to use from several threads.

    Attributes:
        vocab_size: the largest token id plus one. The model's own vocabulary may be padded beyond it.
        id_limit: ids from here on are refused; those between `vocab_size` and `id_limit` are rows of the model that
            no token belongs to, and add no text.
        special_ids: ids of the control tokens (those that `decode` can skip).
        special_tokens: their texts, as a template's renderer needs them.
        template_variables: ``bos_token``, ``eos_token`` and so on, the texts a chat template may ask for.
        eos_token_ids: every id that the tokenizer itself declares to end a turn or a text; may be empty.
        fill_in_middle: the control tokens for a text between two others, or None where the vocabulary has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template_variables: Mapping[str, str],
        eos_token_ids: Iterable[int] | None = None,
        fill_in_middle: FillInMiddle | None = None,
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
        model_vocab_size: int = 0,
    ) -> None:
        """Wrap `backend`.

        Args:
            backend: the library's tokenizer; its truncation and padding are switched off.
            template_variables: texts by role (``bos_token`` ...).
            eos_token_ids: the ids that end a text; by default that of ``eos_token``.
            fill_in_middle: the tokens for filling in the middle; by default those of a known spelling.
            add_bos_token: whether encoding puts the BOS token first. None leaves it to the backend's post-processor.
            add_eos_token: likewise for EOS at the end.
            model_vocab_size: rows of the model's vocabulary, where that is known.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()
        self._inert_encoder: InertEncoder | None = None
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.special_tokens = SpecialTokens(self._special)
        self.template_variables = dict(template_variables)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size > MOST_TOKENS:
            raise CheckpointError(
                f"the tokenizer has a token with id {self.vocab_size - 1}; ids above {MOST_TOKENS - 1} are not read: "
                "the file is damaged"
            )
        self.id_limit = max(self.vocab_size, model_vocab_size)
        eos = (self.eos_token_id,) if self.eos_token_id is not None else ()
        self.eos_token_ids = eos if eos_token_ids is None else tuple(dict.fromkeys(eos_token_ids))
        self.fill_in_middle = fill_in_middle or spelled_tokens(self.token_id)
        self._prefix, self._suffix = self._framing(add_bos_token, add_eos_token)

    @classmethod
    def from_directory(cls, path: Path, *, model_vocab_size: int = 0) -> Tokenizer:
        """Read ``tokenizer.json`` and, where they exist, ``tokenizer_config.json`` and ``special_tokens_map.json``.

        Raises:
            CheckpointError: a file is missing or damaged, or the tokenizer is of a kind that is not supported.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{file} does not exist, and it is the only tokenizer format read from a directory. Save the "
                "tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(...)` to get it."
            )
        config = {
            **optional_json_object(path / "special_tokens_map.json"),
            **optional_json_object(path / "tokenizer_config.json"),
        }
        variables = {key: text for key in _ROLE_KEYS if (text := _token_text(config.get(key))) is not None}
        backend = _parse_backend(file)
        _add_missing_tokens(backend, config, variables)
        return cls(
            backend,
            template_variables=variables,
            add_bos_token=_flag(config, "add_bos_token"),
            add_eos_token=_flag(config, "add_eos_token"),
            model_vocab_size=model_vocab_size,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, model_vocab_size: int = 0) -> Tokenizer:
        """Build the tokenizer that GGUF metadata describes; `model_vocab_size` as in `Tokenizer`.

        Raises:
            CheckpointError: a key is missing, ill-typed or contradicts another one; the message names it.
        """
        described = read_gguf_tokenizer(metadata)
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        fim = [described.ids[role] for role in ("fim_pre", "fim_suf", "fim_mid") if role in described.ids]
        return cls(
            described.backend,
            template_variables={
                variable: described.tokens[described.ids[role]]
                for variable, role in roles.items()
                if role in described.ids
            },
            eos_token_ids=[described.ids[role] for role in ("eos", "eot", "eom") if role in described.ids],
            fill_in_middle=FillInMiddle(*fim) if len(fim) == 3 else None,
            add_bos_token=described.add_bos_token,
            add_eos_token=described.add_eos_token,
            model_vocab_size=max(len(described.tokens), model_vocab_size),
        )

    def _framing(self, add_bos: bool | None, add_eos: bool | None) -> tuple[list[int], list[int]]:
        """The ids before and after a text, from the post-processor's example and the explicit flags."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        framed = self._backend.encode("a", add_special_tokens=True).ids
        before = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), len(framed))
        prefix, suffix = framed[:before], framed[before + len(bare) :]
        bos, eos = self.bos_token_id, self.eos_token_id
        if add_bos is False:
            prefix = [token for token in prefix if token != bos]
        elif add_bos and bos is not None and bos not in prefix:
            prefix = [bos, *prefix]
        if add_eos is False:
            suffix = [token for token in suffix if token != eos]
        elif add_eos and eos is not None and eos not in suffix:
            suffix = [*suffix, eos]
        return prefix, suffix

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self._role_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, or None."""
        return self._role_id("eos_token")

    @property
    def add_bos_token(self) -> bool:
        """Whether `encode` puts the BOS token first when it adds special tokens."""
        return self.bos_token_id is not None and self.bos_token_id in self._prefix

    def _role_id(self, role: str) -> int | None:
        text = self.template_variables.get(role)
        return None if text is None else self.token_id(text)

    def token_id(self, text: str) -> int | None:
        """Id of the token that is spelled `text` in the vocabulary, such as ``<|fim_prefix|>``, or None."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. Lone surrogates are read as U+FFFD; bytes that no token spells are dropped.

        Args:
            text: any text; the empty one has no ids but those that are added.
            add_special_tokens: add BOS and EOS as the tokenizer's own files say.
            parse_special: whether the text of a special token is that token. Otherwise it is ordinary text. Added
                tokens that are not special (``<think>`` in many vocabularies) are part of the text in both cases.
        """
        text = replace_surrogates(text)
        if parse_special or not self.special_tokens.occurs_in(text):
            ids = encoded(self._backend, text)
        else:
            ids = self._inert().encode_text(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else list(ids)

    def encode_chat(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered conversation: genuine special tokens are parsed, those in messages are not.

        Nothing is added: a template writes BOS itself. Where no message contains a special token's text, the ids are
        those of ``encode(prompt.text, add_special_tokens=False)``.
        """
        text = replace_surrogates(prompt.text)
        if not prompt.breaks:
            return encoded(self._backend, text)
        return self._inert().encode(RenderedPrompt(text, prompt.breaks))

    def _inert(self) -> InertEncoder:
        # A second copy of the vocabulary, so it is made when some text first asks for it.
        with self._lock:
            if self._inert_encoder is None:
                self._inert_encoder = InertEncoder(self._backend, self._special)
            return self._inert_encoder

    @cached_property
    def _bytes(self) -> TokenBytes:
        return token_bytes(self._backend)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has about n / longest_token tokens at least."""
        return max(map(len, self._bytes.table), default=1)

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` drops one space from the start of a text, as SentencePiece's dummy prefix asks for."""
        return self._bytes.strips_leading_space

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text; joined over a sequence they are its text in UTF-8.

        Only the first space of a whole text is not told by single tokens, see `strips_leading_space`.

        Raises:
            ValueError: `token` is not an id of this vocabulary.
        """
        if not 0 <= token < self.id_limit:
            raise ValueError(
                f"Token id {token} is outside the vocabulary: ids go from 0 to {self.id_limit - 1}. "
                "Were the ids made by another model's tokenizer?"
            )
        table = self._bytes.table
        return table[token] if token < len(table) else b""

    def token_text(self, token: int) -> str:
        """The text of a single token, with U+FFFD for bytes that are no character by themselves."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`: their bytes joined, with U+FFFD for what is not UTF-8, and no clean-up of spaces.

        So it is what decoding piece by piece gives. The `tokenizers` library differs in one case: where a run of
        SentencePiece byte tokens is not UTF-8 as a whole, it replaces the valid characters of that run as well.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in ids if token not in skipped])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def offsets(self, text: str, ids: Iterable[int]) -> list[int]:
        """How many characters of `text` come before each of its tokens `ids`.

        Exact where the tokens' bytes are the text, control tokens that `encode` added aside. A normaliser that changes
        the text moves the places after the change by as much.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, place = [], 0
        for token in ids:
            offsets.append(min(place, len(text)))
            piece = decoder.decode(self.token_bytes(token))
            if token in self.special_ids and not text.startswith(piece, place):
                continue
            if place == 0 and self.strips_leading_space and not text.startswith(" "):
                piece = piece.removeprefix(" ")
            place += len(piece)
        return offsets


def load_tokenizer(checkpoint: Checkpoint, *, model_vocab_size: int = 0) -> Tokenizer:
    """The tokenizer of an opened checkpoint; `model_vocab_size` as in `Tokenizer`.

    Raises:
        CheckpointError: it is missing, damaged or not supported.
    """
    if checkpoint.naming == "gguf":
        tokenizer = Tokenizer.from_gguf(checkpoint.config, model_vocab_size=model_vocab_size)
    else:
        tokenizer = Tokenizer.from_directory(checkpoint.path, model_vocab_size=model_vocab_size)
    tokenizer.token_bytes(0)  # a decoder that is not understood shows now, not in the first reply
    return tokenizer


def optional_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file; CheckpointError when it is damaged."""
    return read_json_object(MappedFile(file)) if file.is_file() else {}


def _parse_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise CheckpointError(f"{file} could not be read by the `tokenizers` library: {error}") from error


def _token_text(value: object) -> str | None:
    """A token as the configuration files spell it: its text, or an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"tokenizer_config.json: {key} should be true, false or null, not {value!r}.")
    return value


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Add what only tokenizer_config.json knows: older directories list added tokens and roles there alone."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    try:
        missing = {
            int(id_): tokenizers.AddedToken(**token) for id_, token in listed.items() if token["content"] not in known
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "tokenizer_config.json: added_tokens_decoder should map ids to objects with the fields of an added "
            f"token (content, special, lstrip, rstrip, single_word, normalized): {error!r}"
        ) from error
    for id_, token in sorted(missing.items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != id_:
            raise CheckpointError(
                f"tokenizer_config.json gives {token.content!r} the id {id_}, but tokenizer.json leaves "
                f"{backend.token_to_id(token.content)} for it: the two files do not belong together."
            )
        known[token.content] = token
    for text in variables.values():
        if backend.token_to_id(text) is not None and (text not in known or not known[text].special):
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
