"""A terminal that a test types at."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CTRL_C, CTRL_D, UP, BACKSPACE = b"\x03", b"\x04", b"\x1b[A", b"\x7f"
SILENCE_SECONDS = 0.3
MOST_SILENCES = 200


class Terminal:
    """The terminal of a running program."""

    def __init__(self, controller: int, program: subprocess.Popen[bytes]) -> None:
        self._controller = controller
        self._program = program
        self._unread = b""

    def type(self, keys: str | bytes) -> None:
        """Press keys."""
        os.write(self._controller, keys.encode() if isinstance(keys, str) else keys)

    def shows(self, wanted: str, *, press: bytes = b"") -> str:
        """Wait until the terminal shows `wanted`, and give what it showed before, from the last call on.

        Args:
            wanted: its lines end in a plain newline.
            press: a key to press whenever the terminal is silent.
        """
        raw = wanted.replace("\n", "\r\n").encode()
        silences = 0
        while raw not in self._unread:
            ready, _, _ = select.select([self._controller], [], [], SILENCE_SECONDS)
            if ready:
                self._unread += os.read(self._controller, 4096)
                continue
            silences += 1
            if silences == MOST_SILENCES:
                pytest.fail(f"waiting for {wanted!r}, the terminal shows {self._unread!r}")
            self.type(press)
        before, _, self._unread = self._unread.partition(raw)
        return before.decode(errors="replace").replace("\r\n", "\n")

    def ends(self, status: int) -> None:
        """Wait until the program has ended."""
        assert self._program.wait(60) == status


@contextmanager
def terminal(*arguments: str, model: str = "scripted") -> Iterator[Terminal]:
    """PocketLLM called with `arguments`, over the ``scripted`` model of `terminal_session` or a ``real`` one."""
    controller, side = pty.openpty()
    program_file = str(Path(__file__).with_name("terminal_session.py"))
    command = [sys.executable, program_file, os.ttyname(side), model, *arguments]
    # What a terminal can do and what a user has set up would change the bytes that are shown.
    environment = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull}
    with subprocess.Popen(command, start_new_session=True, env=environment) as program:
        try:
            yield Terminal(controller, program)
        finally:
            program.kill()
            os.close(controller)
            os.close(side)


@contextmanager
def chat(*arguments: str, model: str = "scripted") -> Iterator[Terminal]:
    """A conversation whose first prompt is shown."""
    with terminal("chat", *arguments, model=model) as opened:
        opened.shows("Ctrl-C stops a reply, ctrl-D ends.\n> ")
        yield opened
