"""What is known of ops, as JSON for programs and as tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS = 120
"""Width of the tables where no terminal has one."""

Facts = dict[str, Any]


def write_json(found: Facts | Sequence[Facts], out: TextIO) -> None:
    """The facts under their own names, on one line."""
    out.write(json.dumps(found, ensure_ascii=False) + "\n")


def write_ops(ops: Sequence[Facts], out: TextIO) -> None:
    """A line for each op: how each backend serves it, and what it does."""
    backends = list(ops[0]["backends"])
    rows = [[op["op"], *(_service(op["backends"][name]) for name in backends), op["summary"]] for op in ops]
    _print(out, _table(["op", *backends, "what it does"], rows))


def write_contract(op: Facts, out: TextIO) -> None:
    """One op's contract, its implementations and the sizes that it is timed at."""
    grid = Table.grid(padding=(0, 2))
    for name, text in _facts(op):
        grid.add_row(name, Text(text))
    operands = [[o["name"], o["role"], _shape(o["dims"]), o["dtype"], _remarks(o)] for o in op["operands"]]
    shapes = [[_sizes(s["dims"]), f"{s['nbytes']:,}", f"{s['operations']:,}"] for s in op["timed at"]]
    services = [[name, service] for name, service in op["backends"].items()]
    _print(
        out,
        grid,
        _table(["operand", "role", "shape", "dtype", ""], operands),
        _table(["backend", "implementation"], services),
        _table(["timed at", "bytes", "operations"], shapes),
    )


def _facts(op: Facts) -> Iterator[tuple[str, str]]:
    yield "op", op["op"]
    yield "what it does", op["summary"]
    if op["made of"]:
        yield "made of", ", ".join(op["made of"])
    yield "scalars", ", ".join(map(_scalar, op["scalars"])) or "none"
    yield "results", op["results"]
    yield "sizes in checks", ", ".join(f"{name} {low} to {high}" for name, (low, high) in op["sizes"].items())
    yield "files", ", ".join(f"kernels/{op['op']}/{name}" for name in op["files"] if name != "__init__.py")


def _scalar(scalar: Facts) -> str:
    default = f" = {scalar['default']!r}" if "default" in scalar else ""
    return f"{scalar['name']}: {scalar['type']}{default}"


def _service(service: str) -> str:
    return "none" if service.startswith("none") else service


def _shape(dims: Sequence[str | int]) -> str:
    return " x ".join(map(str, dims)) or "scalar"


def _remarks(operand: Facts) -> str:
    return ", ".join(name for name in ("optional", "host") if operand[name])


def _sizes(dims: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in dims.items())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*header, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    return table


def _print(out: TextIO, *parts: Table) -> None:
    console = Console(file=out, highlight=False, width=None if out.isatty() else PIPED_COLUMNS)
    for part in parts:
        console.print(part)
