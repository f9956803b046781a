"""What compiled GPU kernels take: registers, spills and shared memory, found without a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pocketllm.bench import report
from pocketllm.bench.circumstances import Circumstances
from pocketllm.errors import ConfigurationError
from pocketllm.kernels.registry import check_op_names, imported

NAME = "resources"
HELP = "Registers, spills and shared memory of the GPU kernels; needs no GPU."

REPORTS = {
    "triton": "pocketllm.kernels.jit.report_triton",
    "cupy": "pocketllm.kernels.jit.report_cupy",
}
"""By backend, the module that compiles its kernels: ``ops()`` has those with kernels, ``rows(ops)`` the table's lines
with values for `COLUMNS`."""

COLUMNS = ("architecture", "kernel", "registers", "spilled", "shared", "variant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The report's options."""
    parser.add_argument("op", nargs="*", help="only these ops; all by default")
    parser.add_argument("--backend", choices=tuple(REPORTS), default=next(iter(REPORTS)), help="whose kernels")
    report.add_output_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Compile, print, write.

    Returns:
        1 where a kernel spills registers to memory, else 0.

    Raises:
        ConfigurationError: an op has no kernel of this backend.
        UnsupportedFeatureError: its compiler is not installed.
    """
    check_op_names(given.op)
    circumstances = Circumstances()
    compiled = imported(REPORTS[given.backend], given.backend)
    for op in given.op:
        if op not in compiled.ops():
            raise ConfigurationError(
                f"op {op!r} has no kernel of {given.backend!r}; these have: {', '.join(compiled.ops())}"
            )
    rows: list[dict[str, Any]] = list(compiled.rows(given.op or compiled.ops()))
    record = {
        "benchmark": NAME,
        "backend": given.backend,
        "circumstances": circumstances.as_dict(),
        "kernels": rows,
    }
    report.publish(record, markdown, given)
    spilling = sum(row["spilled"] > 0 for row in rows)
    if spilling:
        print(f"{spilling} kernels spill registers to memory", file=sys.stderr)
    return int(spilling > 0)


def markdown(record: report.Record) -> str:
    """The record as a page."""
    return report.page(
        f"What the kernels of `{record['backend']}` take",
        "Registers of a thread, bytes of a thread spilled to memory, and bytes of shared memory of a block, for each "
        "specialisation that the sizes need at which the ops are timed.",
        report.table(COLUMNS, [[str(row[column]) for column in COLUMNS] for row in record["kernels"]]),
        "## Circumstances",
        report.facts(record["circumstances"]),
    )
