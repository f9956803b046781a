"""A program for tests: a conversation with a scripted model, on the terminal that the command line names."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from pocketllm.cli.conversation import Conversation
from pocketllm.cli.messages import terminal_lines
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams


def main(terminal: str) -> None:
    # The first terminal that a process without one opens becomes its own.
    opened = os.open(terminal, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(opened, standard)
    scripted = runpy.run_path(str(Path(__file__).parents[1] / "scripted.py"), run_name="scripted")
    vocabulary = scripted["Vocabulary"]()

    def shout(context: tuple[int, ...]) -> int:
        prompt, _, reply = bytes(context).decode().rpartition(">")
        return ord(prompt.upper()[len(reply)]) if len(reply) < len(prompt) else vocabulary.end

    with LLM.over(scripted["scripted_engine"](shout, vocabulary)) as llm:
        Conversation(llm, SamplingParams()).run(terminal_lines())


if __name__ == "__main__":
    main(sys.argv[1])
