"""Walking for long: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from pocketllm.models.family import model_types
from pocketllm.runtimes.registry import BACKENDS
from tests.runtimes.conformance.machine import BrokenContractError
from tests.runtimes.conformance.models import save_model, scale_for
from tests.runtimes.conformance.walk import Instance, Walk

TELL_EVERY = 1000


def main() -> int:
    """The exit status: 0 where every walk held."""
    arguments = _parser().parse_args()
    scale = scale_for(arguments.backend)
    with tempfile.TemporaryDirectory() as folder:
        for model_type in arguments.family:
            walk = Walk(
                instances=[Instance(arguments.backend, threads) for threads in arguments.threads],
                folder=save_model(model_type, scale, Path(folder) / model_type),
                scale=scale,
                seed=arguments.seed,
            )
            print(f"{arguments.backend}, {model_type}, seed {arguments.seed}, threads {arguments.threads}", flush=True)
            if not _held(walk, arguments.only or range(arguments.steps), shorten=not arguments.only):
                return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.runtimes.conformance", description=__doc__)
    parser.add_argument("--backend", choices=list(BACKENDS), required=True)
    parser.add_argument("--family", choices=model_types(), nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="an instance for each count")
    parser.add_argument("--only", type=int, nargs="+", metavar="STEP", help="replay these steps of the seed alone")
    return parser


def _held(walk: Walk, steps: range | list[int], *, shorten: bool) -> bool:
    start, reached = time.process_time(), 0

    def tell(done: int) -> None:
        nonlocal reached
        reached = done
        if done % TELL_EVERY == 0:
            print(f"{done} steps, {time.process_time() - start:.0f} s of processor", flush=True)

    try:
        counts = walk.take(steps, tell)
    except BrokenContractError as failure:
        print(failure)
        if shorten:
            print("leaving steps out ...", flush=True)
            fewer = walk.shortened(steps[: reached + 1])
            print(f"{walk.failure(fewer)}\nreplay: --seed {walk.seed} --only {' '.join(map(str, fewer))}")
        return False
    _report(counts, time.process_time() - start)
    return True


def _report(counts: Counter[str], seconds: float) -> None:
    for what, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:>9} {what}")
    print(f"held, in {seconds:.0f} s of processor time", flush=True)


if __name__ == "__main__":
    sys.exit(main())
