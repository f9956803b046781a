"""From lines to messages."""

from __future__ import annotations

import io

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pocketllm.cli.messages import CONTINUED, PROMPT, Message, piped_lines, read_message


def messages(text: str) -> list[Message]:
    read_line = piped_lines(io.StringIO(text))
    found = []
    while True:
        try:
            found.append(read_message(read_line))
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("one\ntwo", [Message("one"), Message("two")]),
        ("one\r\n  two  \n", [Message("one"), Message("two")]),
        ("\n", [Message("")]),
        ("one\\\ntwo\\\nthree\nfour", [Message("one\ntwo\nthree"), Message("four")]),
        ("one\\", [Message("one")]),
        ('"""one\n\n  two\n"""\nthree', [Message("one\n\n  two", verbatim=True), Message("three")]),
        ('"""/exit"""', [Message("/exit", verbatim=True)]),
        ('"""\none', [Message("one", verbatim=True)]),
        ('"""\nends here"""  \n', [Message("ends here", verbatim=True)]),
        ('"""', [Message("", verbatim=True)]),
    ],
)
def test_lines_become_messages(text: str, expected: list[Message]) -> None:
    assert messages(text) == expected


@given(st.lists(st.text(st.characters(exclude_characters='"\\\r\n', exclude_categories=["C", "Z"]), min_size=1)))
def test_a_line_is_a_message(lines: list[str]) -> None:
    assert messages("\n".join(lines)) == [Message(line) for line in lines]


@given(st.lists(st.text(st.characters(exclude_characters='"\r\n', exclude_categories=["C"])), min_size=1))
def test_a_block_is_taken_as_it_stands(lines: list[str]) -> None:
    text = "\n".join(lines).strip("\n")
    assert messages(f'"""\n{text}\n"""\n') == [Message(text, verbatim=True)]


def test_open_messages_show_another_prompt() -> None:
    shown = []
    lines = iter(["a\\", '"""', "b", '"""'])

    def read_line(prompt: str) -> str:
        shown.append(prompt)
        return next(lines)

    read_message(read_line)
    assert shown == [PROMPT, CONTINUED]
