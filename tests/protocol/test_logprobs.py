"""Log probabilities on the wire: exact bytes, names that do not collide, offsets into the text, numbers of JSON."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pocketllm.protocol.json_text import dumps
from pocketllm.protocol.openai.logprobs import Placing, chat_logprobs, completion_logprobs, token_name
from pocketllm.types import TokenLogprob

SMILEY = "\U0001f60a".encode()


def entry(token: bytes, logprob: float = -1.0, token_id: int = 0, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id, token, logprob, top)


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=6))
def test_joined_bytes_are_the_text(tokens: list[bytes]) -> None:
    logprobs = chat_logprobs([entry(token) for token in tokens])
    assert logprobs is not None
    assert b"".join(bytes(item["bytes"]) for item in logprobs["content"]) == b"".join(tokens)
    dumps(logprobs).encode()


def test_each_token_is_decoded_alone() -> None:
    alternatives = (entry(SMILEY[:3], -0.5, 1), entry(SMILEY[3:], -1.5, 2), entry(b"x", -2.5, 3))
    logprobs = chat_logprobs([entry(SMILEY[:3], -0.5, 1, *alternatives)])
    assert logprobs is not None
    (item,) = logprobs["content"]
    assert [other["token"] for other in item["top_logprobs"]] == ["\ufffd", "\ufffd", "x"]
    assert [bytes(other["bytes"]) for other in item["top_logprobs"]] == [SMILEY[:3], SMILEY[3:], b"x"]


def test_nothing_asked_and_nothing_written_differ() -> None:
    assert chat_logprobs(None) is None
    assert chat_logprobs([]) == {"content": [], "refusal": None}


def test_minus_infinity_is_a_number() -> None:
    impossible = entry(b"a", -math.inf, 1, entry(b"b", -math.inf, 2))
    chat = chat_logprobs([impossible])
    assert chat is not None
    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    plain = completion_logprobs(Placing(0, ()).place([impossible]))
    assert plain["token_logprobs"] == [-9999.0]
    assert plain["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]


def test_tokens_of_the_same_text_do_not_collide() -> None:
    twins = (entry(b"a", -0.5, 7), entry(b"a", -1.5, 8))
    (top,) = completion_logprobs(Placing(0, ()).place([entry(b"a", -2.5, 9, *twins)]))["top_logprobs"]
    assert top == {"a": -0.5, "token_id:8": -1.5, "token_id:9": -2.5}


def test_the_token_itself_is_listed_once() -> None:
    own = entry(b"a", -0.5, 7, entry(b"a", -0.5, 7), entry(b"b", -1.5, 8))
    assert completion_logprobs(Placing(0, ()).place([own]))["top_logprobs"] == [{"a": -0.5, "b": -1.5}]
    assert completion_logprobs(Placing(0, ()).place([entry(b"c", -3.0, 9)]))["top_logprobs"] == [{"c": -3.0}]


def test_bytes_that_are_no_text_have_a_name() -> None:
    assert token_name(SMILEY[:2]) == "bytes:\\xf0\\x9f"
    assert token_name(SMILEY) == SMILEY.decode()


@given(st.lists(st.text(min_size=1, max_size=3), max_size=6), st.integers(0, 9), st.data())
def test_offsets_point_into_the_text(pieces: list[str], start: int, data: st.DataObject) -> None:
    """However the bytes are cut into tokens, and into calls, each token's offset is that of its first character."""
    raw = "".join(pieces).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=8))) if raw else []
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if raw[a:b]]
    placing = Placing(start, ())
    placed = [item for token in tokens for item in placing.place([entry(token)])]
    begun = 0
    for item in placed:
        assert item.offset == start + len(raw[:begun].decode("utf-8", "ignore"))
        begun += len(item.token)


def test_control_tokens_take_no_room() -> None:
    placed = Placing(0, {1}).place([entry(b"ab", token_id=0), entry(b"<|x|>", token_id=1), entry(b"c", token_id=2)])
    assert [item.offset for item in placed] == [0, 2, 2]
