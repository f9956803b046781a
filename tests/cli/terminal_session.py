"""A program for tests: PocketLLM on the terminal that the command line names first, its real or a scripted model.

The scripted model answers with its prompt in capitals; a prompt that ends in "forever" gets dots until it is stopped.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from pocketllm import llm
from pocketllm.cli.main import main

WINDOW = 400


def session(terminal: str, model: str, *arguments: str) -> int:
    # The first terminal that a process without one opens becomes its own.
    opened = os.open(terminal, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(opened, standard)
    if model == "scripted":
        use_scripted_model()
    return main(arguments)


def use_scripted_model() -> None:
    scripted = runpy.run_path(str(Path(__file__).parents[1] / "scripted.py"), run_name="scripted")
    vocabulary = scripted["Vocabulary"]()

    def answer(context: tuple[int, ...]) -> int:
        prompt, _, reply = bytes(context).decode().rpartition(">")
        if prompt.endswith("forever"):
            time.sleep(0.05)
            return ord(".")
        return ord(prompt.upper()[len(reply)]) if len(reply) < len(prompt) else vocabulary.end

    engine = scripted["scripted_engine"](answer, vocabulary, max_model_len=WINDOW)
    over = llm.LLM.over
    llm.LLM = lambda arguments: over(engine)  # type: ignore[misc, assignment]


if __name__ == "__main__":
    sys.exit(session(*sys.argv[1:]))
