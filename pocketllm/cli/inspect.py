"""``pocketllm inspect``: what a model is and who can run it, without loading it."""

from __future__ import annotations

import argparse
import sys

NAME = "inspect"
HELP = "Show what a model is and which backends can run it; reads headers only."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("model", metavar="MODEL", help="name, path or Hugging Face id")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--prompt-template", action="store_true", help="show the chat template's text")


def run(given: argparse.Namespace) -> int:
    """Look and tell.

    Raises:
        ModelNotFoundError: no such model.
        CheckpointError: the checkpoint is damaged or not understood.
    """
    from pocketllm.cli.inspection_tables import write_json, write_tables
    from pocketllm.engine.inspection import inspect_model

    write = write_json if given.json else write_tables
    write(inspect_model(given.model), sys.stdout, tensors=given.tensors, template=given.prompt_template)
    return 0
