"""The commands, options and values that the parser knows, as plain data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pocketllm.checkpoint.store import KNOWN_MODELS
from pocketllm.cli.parser import CommandParser
from pocketllm.config import BACKENDS, DTYPES


@dataclass(frozen=True, slots=True)
class Values:
    """What a shell can offer for a value; nothing where every text is as good as another.

    Attributes:
        words: the values themselves; none has a character that means something to a shell.
        files: whether names of files are values too.
    """

    words: tuple[str, ...] = ()
    files: bool = False

    def __or__(self, other: Values) -> Values:
        return Values(self.words + other.words, self.files or other.files)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command.

    Attributes:
        spellings: such as ``--parallel`` and ``-np``.
        help: its first sentence.
        repeated: whether it may be given more than once.
        values: of its value; None when it takes none.
    """

    spellings: tuple[str, ...]
    help: str
    repeated: bool
    values: Values | None


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        path: the program's name and the words that lead to the command.
        help: one sentence.
        options: what begins with a dash.
        argument: what its positional arguments may be.
        commands: those below it.
    """

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    argument: Values
    commands: tuple[Command, ...]

    @property
    def name(self) -> str:
        """The command's own word."""
        return self.path[-1]

    def walk(self) -> Iterator[Command]:
        """This command and all below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


_MODEL = Values(tuple(KNOWN_MODELS), files=True)

# What the parser itself does not tell, by the attribute that a value is parsed into.
_BY_DESTINATION = {
    "model": _MODEL,
    "name": Values(tuple(KNOWN_MODELS)),
    "backend": Values(("auto", *BACKENDS)),
    "device": Values(("auto", "cpu", "cuda")),
    "dtype": Values(DTYPES),
    "access_log": Values(("off", "stderr"), files=True),
}


def read_commands(parser: CommandParser) -> Command:
    """The program's commands."""
    return _command(parser, (parser.prog,))


def _command(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Command:
    if isinstance(parser, CommandParser):
        parser.fill()
    options: list[Option] = []
    commands: list[Command] = []
    argument = Values()
    for action in parser._actions:  # argparse has no public way to ask
        if isinstance(action, argparse._SubParsersAction):
            commands += [_command(below, (*path, name)) for name, below in action.choices.items()]
        elif action.option_strings:
            options.append(_option(action))
        else:
            argument |= _values(action)
    return Command(path, _sentence(parser.description), tuple(options), argument, tuple(commands))


def _option(action: argparse.Action) -> Option:
    repeated = isinstance(action, argparse._AppendAction | argparse._ExtendAction)
    return Option(
        tuple(action.option_strings), _sentence(action.help), repeated, None if action.nargs == 0 else _values(action)
    )


def _values(action: argparse.Action) -> Values:
    if action.choices is not None:
        return Values(tuple(map(str, action.choices)))
    return _BY_DESTINATION.get(action.dest, Values(files=action.type is Path))


def _sentence(help: str | None) -> str:
    """The first sentence, without its end and without the default."""
    first, _, _ = (help or "").partition(". ")
    return first.partition(" (default")[0].rstrip(".").replace("%%", "%")
