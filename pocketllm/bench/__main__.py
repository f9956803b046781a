"""``python -m pocketllm.bench NAME``: run one benchmark, or show a record."""

from __future__ import annotations

import argparse
import sys

from pocketllm.bench import compare, generate, load, ops, quality, resources, show
from pocketllm.errors import PocketLLMError

BENCHMARKS = (generate, compare, load, quality, ops, resources, show)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the command line names; errors are one line."""
    parser = argparse.ArgumentParser(prog="python -m pocketllm.bench", description="Measures PocketLLM.")
    names = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for module in BENCHMARKS:
        benchmark = names.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        benchmark.set_defaults(run=module.run)
        module.add_arguments(benchmark)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
    except PocketLLMError as error:
        print(f"pocketllm: error: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
