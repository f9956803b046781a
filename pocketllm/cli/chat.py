"""``pocketllm chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys

from pocketllm.cli import flags
from pocketllm.cli.conversation import Conversation
from pocketllm.cli.messages import LineReader, piped_lines, terminal_lines

NAME = "chat"
HELP = "Talk to a model; with piped input, one message a line."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("--system", metavar="TEXT", help="the system message; without it the template's own holds")
    parser.add_argument("--stats", action="store_true", help="show the speed of each reply")
    flags.add_sampling_flags(parser)
    flags.add_engine_flags(parser)


def run(given: argparse.Namespace) -> int:
    """Load the model and talk until the input ends; 1 when a piped message got no whole reply."""
    params = flags.sampling_params(given)
    engine_args = flags.engine_args(given)

    from pocketllm.llm import LLM

    interactive = sys.stdin.isatty()
    with LLM(engine_args) as llm:
        if interactive:
            print("Type a message, or /help. Ctrl-C stops a reply, ctrl-D ends.", file=sys.stderr)
        conversation = Conversation(llm, params, system=given.system, stats=given.stats)
        failures = conversation.run(_lines(interactive))
    return 0 if interactive or not failures else 1


def _lines(interactive: bool) -> LineReader:
    return terminal_lines() if interactive else piped_lines(sys.stdin)
