"""Records: JSON with the circumstances and the figures, and the Markdown that is made from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Markdown = Callable[[Record], str]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the record goes."""
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of Markdown")
    parser.add_argument("--out", type=Path, metavar="STEM", help="also write STEM.json and STEM.md")


def publish(record: Record, markdown: Markdown, given: argparse.Namespace) -> None:
    """Print the record, and write it where it was asked for."""
    text = to_json(record)
    # The Markdown is made from what a reader of the file gets.
    page = markdown(json.loads(text))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_name(given.out.name + ".json").write_text(text, encoding="utf-8")
        given.out.with_name(given.out.name + ".md").write_text(page, encoding="utf-8")
    print(text if given.json else page, end="")


def to_json(record: Record) -> str:
    """A record as its file's text."""
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def facts(values: dict[str, Any]) -> str:
    """A Markdown list of names and values."""
    return "\n".join(f"- {name}: {value}" for name, value in values.items())


def page(title: str, *sections: str) -> str:
    """A Markdown page: a title and sections, blank lines between them."""
    return "\n\n".join([f"# {title}", *filter(None, sections)]) + "\n"
