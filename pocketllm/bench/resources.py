"""What compiled GPU kernels take: registers, spills and shared memory, found without a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pocketllm.bench import report
from pocketllm.bench.circumstances import Circumstances
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.registry import check_op_names, imported

NAME = "resources"
HELP = "Registers, spills and shared memory of the GPU kernels; needs no GPU."

REPORTS = {
    "triton": "pocketllm.kernels.jit.report_triton",
    "cupy": "pocketllm.kernels.jit.report_cupy",
}
"""By backend, the module that compiles its kernels: ``ops()`` has those with kernels, ``rows(ops)`` the table's lines
with values for all of `COLUMNS` but the first."""

COLUMNS = ("backend", "architecture", "kernel", "registers", "spilled", "shared", "variant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The report's options."""
    parser.add_argument("op", nargs="*", help="only these ops; all by default")
    parser.add_argument("--backend", choices=tuple(REPORTS), help="only this backend's kernels")
    report.add_output_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Compile, print, write.

    Returns:
        1 where a kernel spills registers to memory, else 0.

    Raises:
        ConfigurationError: an op has no kernel of this backend.
        UnsupportedFeatureError: no compiler is installed, or not that of the backend that was asked for by name.
    """
    check_op_names(given.op)
    circumstances = Circumstances()
    backends = [given.backend] if given.backend else list(REPORTS)
    compiled, skipped = _compilers(backends)
    for op in given.op:
        if not any(op in module.ops() for module in compiled.values()):
            raise ConfigurationError(f"op {op!r} has no kernel of {' or '.join(backends)}: `pocketllm kernels list`")
    rows: list[dict[str, Any]] = [
        {"backend": name} | row
        for name, module in compiled.items()
        for row in module.rows([op for op in given.op or module.ops() if op in module.ops()])
    ]
    record = {
        "benchmark": NAME,
        "backends": list(compiled),
        "skipped": skipped,
        "circumstances": circumstances.as_dict(),
        "kernels": rows,
    }
    report.publish(record, markdown, given)
    spilling = sum(row["spilled"] > 0 for row in rows)
    if spilling:
        print(f"{spilling} kernels spill registers to memory", file=sys.stderr)
    return int(spilling > 0)


def _compilers(backends: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The modules that compile, and why there is none for a backend."""
    compiled, skipped = {}, {}
    for name in backends:
        try:
            compiled[name] = imported(REPORTS[name], name)
        except UnsupportedFeatureError as reason:
            if len(backends) == 1:
                raise
            skipped[name] = str(reason)
    if not compiled:
        raise UnsupportedFeatureError("; ".join(skipped.values()))
    return compiled, skipped


def markdown(record: report.Record) -> str:
    """The record as a page."""
    return report.page(
        f"What the kernels of {' and '.join(f'`{name}`' for name in record['backends'])} take",
        "Registers of a thread, bytes of a thread spilled to memory, and bytes of shared memory of a block, for each "
        "specialisation that the sizes need at which the ops are timed.",
        report.table(COLUMNS, [[str(row[column]) for column in COLUMNS] for row in record["kernels"]]),
        "## Circumstances",
        report.facts(record["circumstances"]),
        report.facts({f"`{name}` was skipped": reason for name, reason in record["skipped"].items()}),
    )
