"""``pocketllm``: reads the command line, runs the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import pocketllm
from pocketllm.cli import chat, generate, models, serve
from pocketllm.errors import ConfigurationError, PocketLLMError

FAILURE = 1
USAGE = 2
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count it."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"pocketllm: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The process's exit status: 0, 1 when the command failed, 2 when it was called wrongly, 130 after ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    _set_up_logging(verbose=arguments.verbose, level=arguments.log_level)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left, as `head` does. The interpreter flushes stdout once more at its end: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:
        if arguments.verbose:
            raise
        print(f"pocketllm: error: {_message(error)}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigurationError) else FAILURE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pocketllm",
        description="Runs language models: in the terminal, or as a server for OpenAI's clients.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pocketllm {pocketllm.__version__}")
    parser.add_argument("--verbose", action="store_true", help="say more, and show tracebacks")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (serve, generate, chat, models):
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP, allow_abbrev=False)
        # Before the command and behind it; SUPPRESS, or the one behind would undo the one before.
        command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        command.set_defaults(run=module.run, log_level=logging.WARNING)
        module.add_arguments(command)
    return parser


def _set_up_logging(*, verbose: bool, level: int) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def _message(error: Exception) -> str:
    """The error in one line. What PocketLLM did not raise on purpose shows its type too: it may be a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, PocketLLMError):
        return text
    return f"{type(error).__name__}: {text} (with --verbose the traceback is shown)"
