"""``pocketllm kernels``: what ops there are, whether implementations are right, how fast they are, what they take."""

from __future__ import annotations

import argparse
import sys
from typing import cast

from pocketllm.cli.parser import CommandParser
from pocketllm.errors import ConfigurationError

NAME = "kernels"
HELP = "List, check and time kernels, and show what compiled ones take."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions; the last two are benchmarks, which say their arguments themselves."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, action, add, text in (
        ("list", _list, _add_list_arguments, "Show the ops and who implements them, or one op's contract."),
        ("check", _check, _add_check_arguments, "Compare implementations with their contracts, on drawn cases."),
        ("bench", _bench, _add_bench_arguments, "Time implementations at the sizes that the contracts name."),
        ("report", _report, _add_report_arguments, "Show registers, spills and shared memory of GPU kernels."),
    ):
        command = cast("CommandParser", actions.add_parser(name, help=text, description=text))
        command.set_defaults(action=action)
        command.add_later = add


def run(given: argparse.Namespace) -> int:
    """Do what the action says.

    Raises:
        ConfigurationError: there is no such op, backend or dtype, a file is no implementation, or there is no standard
            output.
        UnsupportedFeatureError: a backend that was asked for by name cannot run here.
    """
    if sys.stdout is None:
        raise ConfigurationError("standard output is closed, and results are written there: give it a file or a pipe")
    status: int = given.action(given)
    return status


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", help="show this op's contract")
    parser.add_argument("--json", action="store_true", help="write JSON")


def _list(given: argparse.Namespace) -> int:
    from pocketllm.cli.kernel_tables import write_contract, write_json, write_ops
    from pocketllm.kernels.checking.inventory import contract_facts, op_facts
    from pocketllm.kernels.registry import check_op_names, op_names

    if given.op is not None:
        check_op_names([given.op])
        (write_json if given.json else write_contract)(contract_facts(given.op), sys.stdout)
    else:
        (write_json if given.json else write_ops)([op_facts(op) for op in op_names()], sys.stdout)
    return 0


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="*", help="only these ops; all by default")
    parser.add_argument("--backend", metavar="NAME", help="only this backend")
    parser.add_argument("--device", metavar="NAME", help="where it computes (default: the backend's own choice)")
    parser.add_argument("--dtype", metavar="NAME", help="only this dtype, such as float32")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cases", type=_positive, default=50, metavar="N", help="how many cases (default 50)")
    which.add_argument("--case", type=_count, metavar="I", help="only case I of the seed, from 0")
    parser.add_argument("--seed", type=_count, default=0, metavar="N", help="what they are drawn from (default 0)")
    parser.add_argument(
        "--file", metavar="PATH.py", help="an implementation that lies elsewhere, for one op and one backend"
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1")
    return int(text)


def _check(given: argparse.Namespace) -> int:
    from pocketllm.cli.kernel_checks import check_all

    return check_all(given, sys.stdout)


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    from pocketllm.bench import ops

    ops.add_arguments(parser)


def _bench(given: argparse.Namespace) -> int:
    from pocketllm.bench import ops

    return ops.run(given)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    from pocketllm.bench import resources

    resources.add_arguments(parser)


def _report(given: argparse.Namespace) -> int:
    from pocketllm.bench import resources

    return resources.run(given)
