"""From lines of input to messages.

A line that ends in a backslash goes on in the next one. A line that begins with three quotation marks opens a block
that reaches to three more at the end of a line; a block is taken as it stands, so it can begin with a slash.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

LineReader = Callable[[str], str]
"""Shows a prompt where somebody can see it and gives the next line without its end; EOFError when there is none."""

PROMPT = "> "
CONTINUED = ". "
QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class Message:
    """What was typed.

    Attributes:
        text: without the marks that hold several lines together.
        verbatim: it was a block, which is never a command.
    """

    text: str
    verbatim: bool = False


def read_message(read_line: LineReader) -> Message:
    """The next message. What is open when the input ends is a message; EOFError when there is nothing more."""
    line = read_line(PROMPT)
    if line.startswith(QUOTES):
        return Message(_block(line.removeprefix(QUOTES), read_line), verbatim=True)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        try:
            lines.append(read_line(CONTINUED))
        except EOFError:
            break
    return Message("\n".join(lines).strip())


def _block(first: str, read_line: LineReader) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(read_line(CONTINUED))
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def piped_lines(source: TextIO) -> LineReader:
    """Lines of a file or pipe, without prompts."""

    def read_line(prompt: str) -> str:
        line = source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    return read_line


def terminal_lines() -> LineReader:
    """Lines typed at a terminal, with line editing and history where the platform has it."""
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # which turns `input` into an editor

    def read_line(prompt: str) -> str:
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(flush=True)  # the cursor stands behind the prompt
            raise

    return read_line
