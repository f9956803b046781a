"""How fast implementations of ops are, at the sizes that their contracts name, beside the machine's limits."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from pocketllm.bench import arguments, limits, report
from pocketllm.bench.circumstances import Circumstances, unrest, usable_cores
from pocketllm.bench.speed import SETTLE_SECONDS, runs_with_median
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import Backend, Mode, backend, backend_names
from pocketllm.kernels.checking.comparison import scalars_of
from pocketllm.kernels.checking.discovery import obstacle
from pocketllm.kernels.checking.files import implementation_in
from pocketllm.kernels.contract import BenchShape, Implementation, OpSpec
from pocketllm.kernels.overriding import check_overrides, requested_overrides
from pocketllm.kernels.registry import check_op_names, op_names, spec

NAME = "ops"
HELP = "How fast implementations of ops are, beside the machine's limits."

REPEAT = 5
RUN_SECONDS = 0.02
"""A run makes as many calls as fit, so that the clock's own steps do not matter."""
MOST_CALLS = 2000
BASELINE = "torch"
"""The backend that others are compared with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("op", nargs="*", help="only these ops; all by default")
    parser.add_argument("--backend", type=_backends, metavar="NAME[,NAME]", help="only these backends, and torch")
    parser.add_argument("--device", metavar="NAME", help="where they compute (default: each backend's own choice)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of activations")
    parser.add_argument("--repeat", type=arguments.positive, default=REPEAT, help="runs of each; medians count")
    parser.add_argument(
        "--file", metavar="PATH.py", help="also an implementation that lies elsewhere, for one op and one backend"
    )
    report.add_output_arguments(parser)


def _backends(text: str) -> list[str]:
    names = list(dict.fromkeys([*text.split(","), BASELINE]))
    for name in names:
        if name not in backend_names():
            raise argparse.ArgumentTypeError(f"{name!r} is no backend: give some of {', '.join(backend_names())}")
    return names


def run(given: argparse.Namespace) -> int:
    """Measure, print, write.

    Raises:
        ConfigurationError: there is no such op, or no backend that was asked for has the dtype.
        UnsupportedFeatureError: a backend that was asked for by name cannot be timed here.
    """
    check_op_names(given.op)
    circumstances = Circumstances()
    backends, skipped = _timed_backends(given)
    own = None if given.file is None else _own(given, backends)
    with limits.start(usable_cores()) as meter:
        readings = [meter.call("measure")]
        ops = {
            op: list(_op_figures(op, backends, given, own))
            for op in tqdm(given.op or op_names(), leave=False, disable=None)
        }
        readings.append(meter.call("measure"))
    record = {
        "benchmark": NAME,
        "circumstances": circumstances.as_dict(),
        "dtype": given.dtype,
        "repeat": given.repeat,
        "limits": {
            name: {"unit": unit, **runs_with_median([reading[name] for reading in readings])}
            for name, unit in limits.LIMITS.items()
            if name in readings[0]
        },
        "skipped": skipped,
        "devices": {found.name: found.device for found in backends} | ({own.name: own.backend.device} if own else {}),
        "ops": ops,
    }
    report.publish(record, markdown, given)
    return 0


def _timed_backends(given: argparse.Namespace) -> tuple[list[Backend], dict[str, str]]:
    """Those whose times mean something, and why the others are left out."""
    found, skipped = [], {}
    for name in given.backend or backend_names():
        try:
            candidate = backend(name, given.device)
            if candidate.emulator is not None:
                raise UnsupportedFeatureError(f"its kernels run in {candidate.emulator} here: times say nothing")
            if Mode(given.dtype, given.dtype) not in candidate.modes:
                raise UnsupportedFeatureError(f"it has no {given.dtype}")
            found.append(candidate)
        except UnsupportedFeatureError as reason:
            skipped[name] = str(reason)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ConfigurationError(f"there is nothing to time here: {reasons}")
    return found, skipped


@dataclass(frozen=True)
class _Own:
    """An implementation of the user's own: its file, and the backend whose arrays it gets."""

    name: str
    backend: Backend
    implementation: Implementation


def _own(given: argparse.Namespace, backends: Sequence[Backend]) -> _Own:
    """The implementation of ``--file``, once it is known to be right: how fast a wrong one is says nothing."""
    asked: list[str] = given.backend or []
    names = [name for name in asked if name != BASELINE] or asked
    if len(given.op) != 1 or len(names) != 1:
        raise ConfigurationError("--file is an implementation of one op for one backend: name the op and --backend")
    found = next((one for one in backends if one.name == names[0]), None)
    if found is None:
        raise ConfigurationError(f"--file is for backend {names[0]}, which cannot be timed here")
    override = requested_overrides({given.op[0]: implementation_in(given.file)})
    check_overrides(override, found.name, device=found.device, dtype=given.dtype)
    return _Own(given.file, found, override[given.op[0]])


@dataclass
class _Contender:
    """A bound op with its arguments, under its backend's or its file's name, and the seconds a call of each run."""

    name: str
    backend: Backend
    call: Callable[[], Any]
    calls: int = 1
    runs: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """Compile, start threads, and see how many calls make a run."""
        self._seconds(1)
        self.calls = max(1, min(MOST_CALLS, int(RUN_SECONDS / self._seconds(1))))

    def run(self) -> None:
        """One run."""
        time.sleep(SETTLE_SECONDS)
        self.call()
        self.runs.append(self._seconds(self.calls) / self.calls)

    def _seconds(self, calls: int) -> float:
        self.backend.wait()
        start = time.perf_counter()
        for _ in range(calls):
            self.call()
        self.backend.wait()
        return time.perf_counter() - start


def _op_figures(
    op: str, backends: Sequence[Backend], given: argparse.Namespace, own: _Own | None
) -> Iterator[dict[str, Any]]:
    """The figures of each size at which the op is timed; the backends take turns."""
    contract, mode = spec(op), Mode(given.dtype, given.dtype)
    able: list[tuple[str, Backend, Mapping[str, Implementation]]]
    able = [(found.name, found, {}) for found in backends if obstacle(op, found.name) is None]
    able += [] if own is None else [(own.name, own.backend, {op: own.implementation})]
    for shape in contract.bench:
        contenders, refused = [], {}
        for name, found, overrides in able:
            try:
                contenders.append(_Contender(name, found, _bound_call(contract, shape, found, mode, overrides)))
                contenders[-1].warm_up()
            except UnsupportedFeatureError as reason:
                refused[name] = str(reason)
        for round_number in range(given.repeat):
            first = round_number % max(len(contenders), 1)
            for contender in contenders[first:] + contenders[:first]:
                contender.run()
        figures = {contender.name: _figures(contender, shape, mode) for contender in contenders}
        yield {"sizes": shape.dims, "bytes": shape.nbytes, "operations": shape.operations, "backends": figures} | (
            {"refused": refused} if refused else {}
        )


def _bound_call(
    contract: OpSpec, shape: BenchShape, found: Backend, mode: Mode, overrides: Mapping[str, Implementation]
) -> Callable[[], Any]:
    """A call of the op as a step makes it: all arrays are there, those to write to as well."""
    case = contract.make_case(np.random.default_rng(0), shape.dims)
    operands = {operand.name: operand for operand in contract.operands}
    weights = {name: found.put(array, mode.dtype_of(operands[name])) for name, array in case.weights.items()}
    arrays = {
        name: array if operands[name].host else found.put(array, mode.dtype_of(operands[name]))
        for name, array in case.arrays.items()
    }
    bound = found.table(mode, overrides).bind(contract.name, weights, **scalars_of(case))
    result = bound(**arrays)
    outputs = contract.operands_of("output")
    results = result if isinstance(result, tuple) else (result,) if outputs else ()
    buffers = {operand.name: array for operand, array in zip(outputs, results, strict=True)}
    return lambda: bound(**arrays, **buffers)


def _figures(contender: _Contender, shape: BenchShape, mode: Mode) -> dict[str, Any]:
    seconds = median(contender.runs)
    figures = {"us": runs_with_median([run * 1e6 for run in contender.runs]), "calls a run": contender.calls}
    figures["GFLOP/s"] = float(f"{shape.operations / seconds / 1e9:.4g}")
    if mode.dtype == "float32":  # what the contracts count bytes in
        figures["GB/s"] = float(f"{shape.nbytes / seconds / 1e9:.4g}")
    return figures


def markdown(record: report.Record) -> str:
    """The record as a page."""
    return report.page(
        f"Speed of the kernels in {record['dtype']}",
        unrest(record["circumstances"]),
        "Medians. `of memory` is the share of the read limit: beyond 100 % where the arrays stay in the processor's "
        "caches, as those of a model do not. `of products` is the share of the float32 products. Both limits are the "
        "CPU's. An op that a backend composes of others is timed as it is composed.",
        report.table(["limit", "median"], _limit_rows(record)),
        *(f"## {op}\n\n{_op_table(record, shapes)}" for op, shapes in record["ops"].items()),
        "## Circumstances",
        report.facts(record["circumstances"] | {f"`{name}` runs on": at for name, at in record["devices"].items()}),
        report.facts({f"`{name}` was skipped": reason for name, reason in record["skipped"].items()}),
    )


def _limit_rows(record: report.Record) -> list[list[str]]:
    return [[name, f"{limit['median']:.0f} {limit['unit']}"] for name, limit in record["limits"].items()]


def _op_table(record: report.Record, shapes: Sequence[dict[str, Any]]) -> str:
    rows = []
    for shape in shapes:
        sizes = ", ".join(f"{name} {size}" for name, size in shape["sizes"].items())
        baseline = shape["backends"].get(BASELINE)
        for name, figures in shape["backends"].items():
            on_cpu = record["devices"][name] == "cpu"
            taken = figures["us"]["median"]
            times = "" if baseline is None else f"{baseline['us']['median'] / taken:.2f}"
            read, products = (record["limits"][limit]["median"] for limit in ("read", "float32 products"))
            moved = figures.get("GB/s")
            rows.append(
                [
                    sizes,
                    name,
                    f"{taken:,.1f}",
                    "" if moved is None else f"{moved:.1f}",
                    f"{moved / read:.0%}" if on_cpu and moved is not None else "",
                    f"{figures['GFLOP/s']:.1f}",
                    f"{figures['GFLOP/s'] / products:.0%}" if on_cpu else "",
                    times,
                ]
            )
        rows += [[sizes, name, reason, *[""] * 5] for name, reason in shape.get("refused", {}).items()]
    header = ["sizes", "backend", "µs", "GB/s", "of memory", "GFLOP/s", "of products", f"times {BASELINE}"]
    return report.table(header, rows)
