"""The command line's parser."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

USAGE = 2
"""Exit status of a wrong call."""


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line, takes ``--verbose`` everywhere, and gets its arguments when it first parses.

    So a command's module, and what it imports to know its arguments, costs nothing unless it is called.

    Attributes:
        add_later: adds the arguments.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        # SUPPRESS, or a command's own would undo the one before the command.
        self.add_argument(
            "--verbose", action="store_true", default=argparse.SUPPRESS, help="say more, and show tracebacks"
        )
        self.add_later: Callable[[argparse.ArgumentParser], None] | None = None

    def fill(self) -> None:
        """Add the arguments that wait to be added."""
        add, self.add_later = self.add_later, None
        if add is not None:
            add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in the base class, which calls it on the parser of each command that it meets.

        What the command does not know ends the program here, where its name and its options are known.
        """
        self.fill()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found, unknown

    def _unknown(self, arguments: list[str]) -> str:
        text = f"unrecognized arguments: {' '.join(arguments)}"
        near = difflib.get_close_matches(arguments[0].partition("=")[0], self._option_string_actions, 1, cutoff=0.7)
        return f"{text}: did you mean {near[0]}?" if near else text

    def error(self, message: str) -> NoReturn:
        """End with one line."""
        self.exit(USAGE, f"pocketllm: error: {message} (see {self.prog} --help)\n")
