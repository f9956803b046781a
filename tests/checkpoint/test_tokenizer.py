"""Tokenizers from directories and GGUF metadata against the `tokenizers` library, transformers and plain algorithms."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pocketllm.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from pocketllm.checkpoint.special_tokens import RenderedPrompt, SpecialTokens, unmark, unused_noncharacter
from pocketllm.checkpoint.token_bytes import BYTE_OF_CHARACTER
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.errors import CheckpointError

from .tokenizer_examples import (
    SPECIAL,
    byte_level_metadata,
    golden_directories,
    sentencepiece_metadata,
    train_byte_level,
    write_directory,
)

TRAINED = train_byte_level()
BYTE_LEVEL = Tokenizer.from_gguf(byte_level_metadata(TRAINED, "gpt-2", bos_token_id=1, eos_token_id=2))
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata(["\u2581a", "ab", "\u2581", "a", "b", "s", "<", ">", "/"]))
texts = st.text(st.characters(exclude_categories=["Cs"]))
lines = st.lists(
    st.sampled_from(
        [
            "the ",
            "harbour",
            " ",
            "  ",
            "\n",
            "\r\n",
            "don't",
            "I'LL",
            "12345",
            "\u65e5\u672c",
            "\U0001f60a",
            "_x",
            "\t",
            "\u00e9",
        ]
    )
).map("".join)


# --- encoding ---------------------------------------------------------------------------------------------------------


def test_golden_directories_encode_and_decode_as_transformers_did() -> None:
    for directory, golden in golden_directories():
        tokenizer = Tokenizer.from_directory(directory)
        for case in golden["encode"]:
            assert tokenizer.encode(case["text"]) == case["ids"], (directory.name, case["text"])
            assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids_no_special"]
        for case in golden["decode"]:
            # Within a run of SentencePiece byte tokens that is not UTF-8, the library drops valid characters as well.
            if tokenizer.strips_leading_space or "\ufffd" in case["text"]:
                continue
            assert tokenizer.decode(case["ids"]) == case["text"], directory.name
            assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["text_skip_special"]


@given(lines)
def test_byte_level_equals_transformers(text: str) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=TRAINED)
    ids = BYTE_LEVEL.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert BYTE_LEVEL.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


@given(texts)
def test_byte_level_is_lossless(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, parse_special=False)
    assert BYTE_LEVEL.decode(ids) == text
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("text", ["a , b . c !  it 's", "    ."])
def test_no_clean_up_of_spaces(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_the_byte_table_is_gpt2s() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert sum(ord(character) == byte for character, byte in BYTE_OF_CHARACTER.items()) == 188
    assert set(BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert BYTE_OF_CHARACTER["\u0143"] == 0xAD


def test_empty_text_has_no_ids() -> None:
    assert BYTE_LEVEL.encode("") == []
    assert SENTENCEPIECE.encode("", add_special_tokens=False) == []
    assert SENTENCEPIECE.encode("") == [1]


def test_lone_surrogates_are_read_as_replacement_characters() -> None:
    assert BYTE_LEVEL.encode("a\ud83db") == BYTE_LEVEL.encode("a\ufffdb")


def test_bytes_without_a_token_are_dropped() -> None:
    missing = "\u0106"  # how byte 0x06 is spelled
    metadata = byte_level_metadata(TRAINED, "gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index(missing)] = "unreachable piece"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a\x06b") == tokenizer.encode("a") + tokenizer.encode("b")
    assert tokenizer.encode("\x06") == []


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
def test_decode_is_the_bytes_of_the_tokens(ids: list[int]) -> None:
    joined = b"".join(map(BYTE_LEVEL.token_bytes, ids))
    assert BYTE_LEVEL.decode(ids) == joined.decode("utf-8", "replace")
    assert BYTE_LEVEL.decode(ids) == TRAINED.decode(ids, skip_special_tokens=False)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=True) == TRAINED.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("token", [-1, BYTE_LEVEL.vocab_size, 1 << 40])
def test_an_id_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(ValueError, match=rf"{token} is outside .* 0 to {BYTE_LEVEL.vocab_size - 1}"):
        BYTE_LEVEL.token_bytes(token)
    with pytest.raises(ValueError, match=str(token)):
        BYTE_LEVEL.decode([0, token])


def test_rows_of_the_model_beyond_the_tokenizer_have_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(
        write_directory(tmp_path, TRAINED), model_vocab_size=TRAINED.get_vocab_size() + 8
    )
    assert tokenizer.decode([tokenizer.vocab_size, 3]) == tokenizer.decode([3])
    with pytest.raises(ValueError, match="outside"):
        tokenizer.decode([tokenizer.id_limit])


# --- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "SentencePiece"])
@given(data=st.data())
def test_unparsed_text_never_has_special_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    special = sorted(tokenizer.special_tokens.texts)
    pieces = data.draw(st.lists(st.one_of(st.sampled_from([*special, "<", "|", "<think>", "\ufdd0", "s>"]), texts)))
    text = "".join(pieces)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    if not tokenizer.special_tokens.occurs_in(text):
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_unparsed_special_text_keeps_its_text() -> None:
    text = "say <|stop|> and <think>"
    ids = BYTE_LEVEL.encode(text, parse_special=False)
    assert BYTE_LEVEL.decode(ids) == text
    assert BYTE_LEVEL.token_id("<think>") in ids  # an added token, but not a special one
    assert BYTE_LEVEL.token_id("<|stop|>") in BYTE_LEVEL.encode(text)


def test_merges_that_spell_a_special_token_do_not_make_it() -> None:
    metadata = sentencepiece_metadata(["<", "s", ">", "<s", "s>"], [-9.0, -9.0, -9.0, -1.0, -2.0])
    assert 1 not in Tokenizer.from_gguf(metadata).encode("<s>", add_special_tokens=False, parse_special=False)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "SentencePiece"])
@given(data=st.data())
def test_chat_encoding_keeps_genuine_tokens_and_only_those(tokenizer: Tokenizer, data: st.DataObject) -> None:
    special = sorted(tokenizer.special_tokens.texts)
    template = data.draw(st.lists(st.sampled_from(special), min_size=1))
    content = data.draw(st.lists(st.one_of(st.sampled_from(special), st.text("ab <"))).map("".join))
    mark = unused_noncharacter([content])
    assert mark is not None
    prompt = unmark("".join(token + tokenizer.special_tokens.mark(content, mark) for token in template), mark)
    ids = tokenizer.encode_chat(prompt)
    genuine = [tokenizer.token_id(token) for token in template]
    assert [id_ for id_ in ids if id_ in tokenizer.special_ids] == genuine
    if not prompt.breaks:
        assert ids == tokenizer.encode(prompt.text, add_special_tokens=False)


def test_neutralised_content_encodes_as_if_the_vocabulary_had_no_such_token() -> None:
    prompt = unmark("<|start|>a <\ufdd1|stop|> b<|stop|>", "\ufdd1")
    assert prompt == RenderedPrompt("<|start|>a <|stop|> b<|stop|>", (12,))
    start, stop = BYTE_LEVEL.token_id("<|start|>"), BYTE_LEVEL.token_id("<|stop|>")
    assert BYTE_LEVEL.encode_chat(prompt) == [start, *BYTE_LEVEL.encode("a <|stop|> b", parse_special=False), stop]


def test_marks_break_overlapping_occurrences() -> None:
    tokens = SpecialTokens(["aab", "abc", "x"])
    assert tokens.mark("aabc", "!") == "a!a!bc"
    assert not tokens.occurs_in(tokens.mark("aabc", "!"))
    assert not tokens.occurs_in("x")  # nothing can be put inside a single character


# --- directories ------------------------------------------------------------------------------------------------------


def test_bos_comes_from_the_post_processor_or_the_flag(tmp_path: Path) -> None:
    tokenizer = train_byte_level()
    write_directory(tmp_path, tokenizer, bos_token="<|start|>", add_bos_token=True)
    with_flag = Tokenizer.from_directory(tmp_path)
    assert (with_flag.add_bos_token, with_flag.encode("a")[0]) == (True, with_flag.bos_token_id)
    write_directory(tmp_path, tokenizer, bos_token="<|start|>")
    assert not Tokenizer.from_directory(tmp_path).add_bos_token
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A <|stop|>", special_tokens=[("<|start|>", 1), ("<|stop|>", 2)]
    )
    write_directory(tmp_path, tokenizer, bos_token="<|start|>")
    processed = Tokenizer.from_directory(tmp_path)
    assert processed.encode("a") == [1, *BYTE_LEVEL.encode("a"), 2]
    write_directory(tmp_path, tokenizer, bos_token="<|start|>", add_bos_token=False, add_eos_token=False)
    assert Tokenizer.from_directory(tmp_path).encode("a") == BYTE_LEVEL.encode("a")


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = train_byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    loaded = Tokenizer.from_directory(write_directory(tmp_path, tokenizer))
    assert loaded.encode("a b c d e f") == BYTE_LEVEL.encode("a b c d e f")


def test_roles_are_read_from_either_file_and_spelling(tmp_path: Path) -> None:
    write_directory(tmp_path, TRAINED, eos_token={"content": "<|stop|>", "lstrip": False})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|start|>", "eos_token": "wrong"}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.template_variables == {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, (2,))


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    next_id = TRAINED.get_vocab_size()
    token = {"content": "<|extra|>", "special": True}
    write_directory(tmp_path, TRAINED, added_tokens_decoder={str(next_id): token})
    assert Tokenizer.from_directory(tmp_path).encode("<|extra|>") == [next_id]
    write_directory(tmp_path, TRAINED, added_tokens_decoder={str(next_id + 5): token})
    with pytest.raises(CheckpointError, match=r"do not belong together"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", json.dumps({"model": {"type": "Nope"}}), "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "holds JSON, but no object"),
        ("tokenizer_config.json", "{", "no valid JSON"),
        ("tokenizer_config.json", '{"add_bos_token": 1}', "add_bos_token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 3}}', "added_tokens_decoder"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_directory(tmp_path, TRAINED)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        Tokenizer.from_directory(tmp_path)


# --- GGUF, byte level -------------------------------------------------------------------------------------------------


def merge_by_rank(word: str, merges: list[str]) -> list[str]:
    """Byte-level BPE of one piece, as defined: join the pair of the lowest rank until none is left."""
    spelling = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    symbols = [spelling[byte] for byte in word.encode()]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    while True:
        pairs = list(itertools.pairwise(symbols))
        best = min(range(len(pairs)), key=lambda i: (ranks.get(pairs[i], len(ranks)), i), default=None)
        if best is None or pairs[best] not in ranks:
            return symbols
        symbols[best : best + 2] = ["".join(pairs[best])]


@given(st.text("abcdehorstuwy\u00e9\u65e5", min_size=1, max_size=30))
def test_merges_apply_by_rank(word: str) -> None:
    metadata = byte_level_metadata(TRAINED, "gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    expected = merge_by_rank(word, metadata["tokenizer.ggml.merges"])
    assert [tokens[id_] for id_ in BYTE_LEVEL.encode(word)] == expected


DIGITS_THEN_GPT2 = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
SINGLE_DIGITS = train_byte_level(DIGITS_THEN_GPT2)


@given(lines)
@settings(max_examples=200)
def test_smollm_splits_digits_first_as_the_original_tokenizer_does(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(SINGLE_DIGITS, "smollm"))
    assert tokenizer.encode(text) == SINGLE_DIGITS.encode(text).ids


GOLDEN_PRE_TOKENIZERS = {
    "llama": "llama-bpe", "qwen2": "qwen2", "qwen3_5": "qwen35", "deepseek_v3": "deepseek-v3", "gpt_oss": "gpt-4o",
    "glm4_moe": "glm4", "smollm3": "llama-bpe", "minimax_m2": "gpt-2",
}  # fmt: skip


def test_gguf_metadata_of_the_golden_vocabularies_encodes_the_same() -> None:
    for directory, golden in golden_directories():
        if directory.name in GOLDEN_PRE_TOKENIZERS:
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            tokenizer = Tokenizer.from_gguf(byte_level_metadata(backend, GOLDEN_PRE_TOKENIZERS[directory.name]))
            for case in golden["encode"]:
                assert tokenizer.encode(case["text"]) == case["ids_no_special"], (directory.name, case["text"])


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_splitting_rule_is_lossless(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(TRAINED, name))
    text = "Don't  stop\n\n 12345 \u65e5\u672c\u8a9e!? caf\u00e9\r\n\tx  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gguf_roles_and_flags() -> None:
    metadata = byte_level_metadata(TRAINED, "gpt-2", bos_token_id=np.uint32(1), eos_token_id=2, eot_token_id=0)
    assert (BYTE_LEVEL.bos_token_id, BYTE_LEVEL.add_bos_token) == (1, False)
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("a") == [1, *BYTE_LEVEL.encode("a")]
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.template_variables == {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
    assert tokenizer.special_tokens.texts == set(SPECIAL)
    assert Tokenizer.from_gguf(byte_level_metadata(TRAINED, "llama-bpe", bos_token_id=1)).add_bos_token


def test_arrays_may_be_numpy_arrays() -> None:
    metadata = byte_level_metadata(TRAINED, "gpt-2")
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    assert Tokenizer.from_gguf(metadata).encode("the harbour") == BYTE_LEVEL.encode("the harbour")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "rwkv"}, "'rwkv', which is not supported; supported are gpt2, llama"),
        ({"model": 7}, "tokenizer.ggml.model should be a string"),
        ({"pre": "mystery"}, r"'mystery'.* known are .*smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens should be an array of str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' more than once"),
        ({"token_type": [1, 2]}, r"token_type has 2 entries, but tokenizer.ggml.tokens has \d+"),
        ({"token_type": [9] * TRAINED.get_vocab_size()}, "token_type"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b", "nonsense"]}, r"merges\[\d\]"),
        ({"merges": ["a zzz"]}, r"merges\[0\], 'a zzz'"),
        ({"bos_token_id": 1 << 31}, "bos_token_id is 2147483648, but the vocabulary has"),
        ({"bos_token_id": "1"}, "bos_token_id should be an integer"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "add_bos_token should be a boolean"),
    ],
)
def test_wrong_metadata_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(TRAINED, **{"pre": "gpt-2", **changes}))


# --- GGUF, SentencePiece ----------------------------------------------------------------------------------------------


def sentencepiece_bpe(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, as defined: join the adjacent pair with the best-scored concatenation, leftmost first."""
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [left + right for left, right in itertools.pairwise(symbols)]
        best = max(range(len(pairs)), key=lambda i: (scores.get(pairs[i], -np.inf), -i), default=None)
        if best is None or pairs[best] not in scores:
            return symbols
        symbols[best : best + 2] = [pairs[best]]


@st.composite
def grown_vocabularies(draw: st.DrawFn) -> list[str]:
    """Pieces that grew by joining two earlier ones, as training makes them, in the order in which they were made."""
    pieces = ["\u2581", "a", "b", "c"]
    for _ in range(draw(st.integers(0, 12))):
        joined = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if joined not in pieces:
            pieces.append(joined)
    return pieces


@given(grown_vocabularies(), st.text("abc ", min_size=1, max_size=20))
@settings(max_examples=300)
def test_scores_merge_as_sentencepiece_does(pieces: list[str], text: str) -> None:
    metadata = sentencepiece_metadata(pieces)
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    expected = sentencepiece_bpe(text, {piece: scores[piece] for piece in pieces})
    assert [tokens[id_] for id_ in ids] == expected


@given(texts.filter(bool))
def test_sentencepiece_falls_back_to_bytes_losslessly(text: str) -> None:
    text = text.replace("\u2581", "")
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False, parse_special=False)
    assert SENTENCEPIECE.decode(ids) == text
    assert b"".join(map(SENTENCEPIECE.token_bytes, ids)) == (" " + text).encode() * bool(text)


def test_sentencepiece_conventions() -> None:
    assert SENTENCEPIECE.add_bos_token
    assert SENTENCEPIECE.token_bytes(SENTENCEPIECE.encode("\n", add_special_tokens=False)[-1]) == b"\n"
    assert SENTENCEPIECE.token_text(SENTENCEPIECE.encode("a", add_special_tokens=False)[0]) == " a"
    plain = Tokenizer.from_gguf(sentencepiece_metadata(["a", "\u2581"], add_space_prefix=False, add_bos_token=False))
    assert not plain.strips_leading_space
    assert plain.decode(plain.encode(" a a")) == " a a"


def test_user_defined_pieces_are_matched_before_spaces_are_replaced() -> None:
    metadata = sentencepiece_metadata(["a", "\u2581", "\u2581\u2581\u2581"])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a   a", parse_special=False, add_special_tokens=False)
    assert len(tokenizer._backend.get_vocab()) - 1 in ids
    assert tokenizer.token_text(max(ids)) == "   "
    assert tokenizer.special_ids == {0, 1, 2}


def test_sentencepiece_needs_a_score_for_every_piece() -> None:
    with pytest.raises(CheckpointError, match=r"scores has 1 entries"):
        Tokenizer.from_gguf({**sentencepiece_metadata(["a"]), "tokenizer.ggml.scores": [0.0]})
    with pytest.raises(CheckpointError, match=r"scores is missing"):
        Tokenizer.from_gguf(sentencepiece_metadata(["a"], scores=None) | {"tokenizer.ggml.scores": None})


# --- the real model ---------------------------------------------------------------------------------------------------


def test_smollm2_follows_its_metadata(real_model: Path) -> None:
    fields = gguf.GGUFReader(real_model).fields
    metadata = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.add_bos_token) == (1, (2,), False)
    for text, ids in {"\u5b63": [18753, 113], "\u6b6f": [34978, 124], "\u00ed": [6160]}.items():
        assert (tokenizer.encode(text), tokenizer.decode(ids)) == (ids, text)
    assert tokenizer.encode("a\x06b") == tokenizer.encode("a") + tokenizer.encode("b")
    assert tokenizer.encode("\x04") == []
    root = os.environ.get("POCKETLLM_FIXTURES")
    if root is None:
        return
    golden = json.loads((Path(root) / "smollm2" / "golden.json").read_text(encoding="utf-8"))
    for case in golden["tokenizer_cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    for prompt in golden["prompts"]:
        ids = tokenizer.encode(prompt["text"])  # the long prompt repeats its text
        assert ids == prompt["ids"][: len(ids)]
