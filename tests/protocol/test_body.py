from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.body import MAX_DEPTH, parse_body
from pocketllm.protocol.json_text import dumps

SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_every_json_object_is_read_as_it_is(body: dict[str, object]) -> None:
    assert parse_body(json.dumps(body, ensure_ascii=True).encode()) == body


@given(st.binary())
def test_random_bytes_are_refused_or_an_object(data: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(parse_body(data), dict)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "double precision"),
        (b'{"a": ' + b"9" * 400 + b"}", "double precision"),
        (b'{"a": ' + b"9" * 5000 + b"}", "double precision"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[1]", "list"),
        (b'"text"', "string"),
        (b"null", "null"),
        (b"true", "boolean"),
        (b"3", "number"),
        (b'{"a": 1, "a": 2}', '"a" twice'),
        (b'{"x": {"b": 1, "b": 1}}', '"b" twice'),
    ],
)
def test_what_is_no_object_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError, match="body") as caught:
        parse_body(data)
    assert said in str(caught.value)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3000, 100_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_bodies_are_refused(opening: bytes, depth: int) -> None:
    closing = b"]" if opening == b"[" else b"}"
    for data in (
        b'{"x":' + opening * depth,
        b'{"x":' + opening * depth + b"1" + closing * depth + b"}",
    ):
        with pytest.raises(InvalidRequestError):
            parse_body(data)


def test_depth_up_to_the_limit_is_fine() -> None:
    inner = MAX_DEPTH - 1
    assert parse_body(b'{"x":' + b"[" * inner + b"]" * inner + b"}")


def test_lone_surrogates_become_replacement_characters() -> None:
    body = parse_body(rb'{"a\udc00": ["x\ud83d", {"b": "\ud83d\ude0a"}]}')
    assert body == {"a\ufffd": ["x\ufffd", {"b": "\U0001f60a"}]}
    dumps(body).encode()
