"""``pocketllm``: reads the command line, runs the command, and turns errors into one line and an exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import pocketllm
from pocketllm.cli import bench, chat, completion, generate, inspect, kernels, models, serve
from pocketllm.cli.parser import USAGE, CommandParser
from pocketllm.errors import ConfigurationError, PocketLLMError

COMMANDS = (serve, generate, chat, inspect, models, kernels, bench, completion)

FAILURE = 1
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells count it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The process's exit status: 0, 1 when the command failed, 2 when it was called wrongly, 130 after ctrl-C.
    """
    arguments = program_parser().parse_args(argv)
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


def program_parser() -> CommandParser:
    """The whole command line's parser; a command's own arguments are added when they are asked for."""
    parser = CommandParser(
        prog="pocketllm",
        description="Runs language models: in the terminal, or as a server for OpenAI's clients.",
    )
    parser.add_argument("--version", action="version", version=f"pocketllm {pocketllm.__version__}")
    parser.set_defaults(verbose=False, program=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        command.set_defaults(run=module.run, log_level=logging.WARNING)
        command.add_later = module.add_arguments
    return parser


def _set_up_logging(*, verbose: bool, level: int) -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger(pocketllm.__name__).setLevel(logging.INFO if verbose else level)


def _message(error: Exception) -> str:
    """The error in one line. What PocketLLM did not raise on purpose shows its type too: it may be a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, PocketLLMError):
        return text
    return f"{type(error).__name__}: {text} (with --verbose the traceback is shown)"
