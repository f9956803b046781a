"""``pocketllm bench``: the benchmarks of ``python -m pocketllm.bench``."""

from __future__ import annotations

import argparse

NAME = "bench"
HELP = "Measure speed, load and quality, or show a record."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A command for each benchmark, with the arguments that it says itself."""
    from pocketllm.bench.__main__ import BENCHMARKS

    benchmarks = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for module in BENCHMARKS:
        benchmark = benchmarks.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        benchmark.set_defaults(benchmark=module.run)
        module.add_arguments(benchmark)


def run(given: argparse.Namespace) -> int:
    """Run the benchmark; its module tells what can go wrong."""
    status: int = given.benchmark(given)
    return status
