"""Replies: text never splits a character, and covers exactly the token ids given out with it."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pocketllm.engine.reply import Piece, Reply
from tests.scripted import Vocabulary

VOCABULARY = Vocabulary()
byte_strings = st.binary(max_size=24) | st.text(max_size=8).map(str.encode)


def play(data: bytes, stops: list[str]) -> tuple[list[Piece], int]:
    """Feed bytes one token each until a stop; the pieces, and how many tokens were taken."""
    reply = Reply(VOCABULARY.tokenizer, stops)
    pieces = []
    for taken, byte in enumerate(data, start=1):
        pieces.append(reply.add(byte))
        if pieces[-1].stop_match is not None:
            return pieces, taken
    return [*pieces, reply.finish()], len(data)


@given(byte_strings)
@example(b"\xed\xa0")
@example(b"a\xed\xbf")
def test_joined_text_is_the_decoded_bytes_without_an_incomplete_tail(data: bytes) -> None:
    pieces, _ = play(data, [])
    text = "".join(piece.text for piece in pieces)
    whole = data.decode("utf-8", "replace")
    incomplete = {"", "\ufffd"}
    assert whole.startswith(text)
    assert whole[len(text) :] in incomplete


@given(st.text(max_size=12))
def test_valid_text_comes_back_and_no_piece_has_a_replacement(text: str) -> None:
    pieces, _ = play(text.encode(), [])
    assert "".join(piece.text for piece in pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece.text for piece in pieces)


@given(byte_strings, st.lists(st.text("ab\u00e9\u65e5", min_size=1, max_size=3), max_size=2))
def test_token_ids_cover_exactly_the_text(data: bytes, stops: list[str]) -> None:
    pieces, _ = play(data, stops)
    tokens = [token for piece in pieces for token in piece.token_ids]
    text = "".join(piece.text for piece in pieces)
    assert tokens == list(data[: len(tokens)])
    # With the tokens given the whole text is there; with one fewer its last character is not.
    assert bytes(tokens).decode("utf-8", "replace").startswith(text)
    if text:
        assert len(tokens) > 0
        assert not begins_with_certainty(bytes(tokens[:-1]), text)


def begins_with_certainty(data: bytes, text: str) -> bool:
    """Whether these bytes alone already give the text, whatever follows them."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data).startswith(text)


def test_a_replaced_character_does_not_bring_the_token_that_reveals_it() -> None:
    pieces, _ = play(b"\xe2\x82A", ["A"])
    assert "".join(piece.text for piece in pieces) == "\ufffd"
    assert [token for piece in pieces for token in piece.token_ids] == [0xE2, 0x82]


def test_a_smiley_cut_short_is_dropped_with_its_tokens() -> None:
    smiley = "\U0001f60a".encode()
    pieces, _ = play(smiley + smiley[:3], [])
    assert "".join(piece.text for piece in pieces) == "\U0001f60a"
    assert [token for piece in pieces for token in piece.token_ids] == list(smiley)


def test_bytes_that_can_never_complete_are_replaced_at_once() -> None:
    reply = Reply(VOCABULARY.tokenizer, [])
    assert reply.add(0x80).text == "\ufffd"
    assert reply.add(ord("a")).text == "a"


def test_control_tokens_have_no_text_and_are_given_out_in_their_place() -> None:
    reply = Reply(VOCABULARY.tokenizer, [])
    for token, text in ((257, ""), (ord("a"), "a")):
        piece = reply.add(token)
        assert (piece.text, piece.token_ids) == (text, (token,))


@pytest.mark.parametrize(
    ("stop", "text", "match"),
    [("IJKL", "DEFGH", "IJKL"), ("GH", "DEF", "GH"), ("", "DEFGHIJKLMN", None)],
)
def test_a_stop_string_may_begin_and_end_within_tokens(stop: str, text: str, match: str | None) -> None:
    vocabulary = Vocabulary(["DEF", "GH", "I", "J", "K", "LM", "N"])
    reply = Reply(vocabulary.tokenizer, [stop])
    shown, tokens, found = "", [], None
    for token in vocabulary.ids("DEF", "GH", "I", "J", "K", "LM", "N"):
        piece = reply.add(token)
        shown, tokens, found = shown + piece.text, [*tokens, *piece.token_ids], piece.stop_match
        if found:
            break
    else:
        shown += reply.finish().text
    assert (shown, found) == (text, match)
    covered = {"DEFGH": ["DEF", "GH"], "DEF": ["DEF"], "DEFGHIJKLMN": ["DEF", "GH", "I", "J", "K", "LM", "N"]}
    assert tokens == vocabulary.ids(*covered[text])
