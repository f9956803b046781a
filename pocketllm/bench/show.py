"""A record as the page that its benchmark made of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pocketllm.bench import compare, generate, load, ops, quality, report, resources
from pocketllm.errors import ConfigurationError

NAME = "show"
HELP = "Print a record as Markdown."

PAGES: dict[str, report.Markdown] = {
    module.NAME: module.markdown for module in (generate, compare, load, quality, ops, resources)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The record."""
    parser.add_argument("record", type=Path, metavar="FILE.json", help="as --out wrote it")


def run(given: argparse.Namespace) -> int:
    """Print the page."""
    print(markdown(given.record), end="")
    return 0


def markdown(file: Path) -> str:
    """The page of the record in `file`.

    Raises:
        ConfigurationError: it is no record.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        page = PAGES[record["benchmark"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{file} is no record of a benchmark ({error}): give a file that --out wrote"
        ) from None
    return page(record)
