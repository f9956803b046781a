"""How far quantised arithmetic moves a model: next-token distributions against the float32 reference, over one text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from pocketllm.bench import arguments, prompts, report
from pocketllm.bench.circumstances import Circumstances
from pocketllm.bench.contenders.base import LogProbabilities, Setup
from pocketllm.bench.contenders.registry import PEERS, start
from pocketllm.bench.generate import circumstances_section
from pocketllm.errors import ConfigurationError

NAME = "quality"
HELP = "KL divergence and agreement of next-token distributions against the float32 reference."

REFERENCE = "torch"
WINDOW = 256
"""Tokens that are read at once, each window from an empty cache: it bounds the memory that distributions take."""

QUICK_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    arguments.add_model_arguments(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text than the one that comes along (UTF-8)")
    parser.add_argument("--quick", action="store_true", help="a few tokens only, to see that it works")
    report.add_output_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, print, write."""
    circumstances = Circumstances()
    path = arguments.checkpoint_path(given.model)
    token_ids = prompts.tokens(path, _text(given.text))
    if given.quick:
        token_ids = token_ids[:QUICK_TOKENS]
    windows = [token_ids[place : place + WINDOW] for place in range(0, len(token_ids), WINDOW)]
    setup = Setup(path=path, threads=given.threads, sequences=1, context=WINDOW, device=given.device)
    skipped = {name: reason for name, peer in PEERS.items() if (reason := peer.lacks(path))}
    names = [*given.backend, *(name for name in PEERS if name not in skipped)]
    record = {
        "benchmark": NAME,
        "checkpoint": arguments.file_facts(path),
        "threads": given.threads,
        "text": {
            "name": given.text.name if given.text else "data/text.txt",
            "tokens": len(token_ids),
            "window": WINDOW,
        },
        "reference": f"{REFERENCE}, float32",
        "contenders": _figures(names, setup, windows),
        "skipped": skipped,
    }
    record["circumstances"] = circumstances.as_dict()
    report.publish(record, markdown, given)
    return 0


def _text(file: Path | None) -> str:
    if file is None:
        return prompts.text()
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--text {file}: {error}: give a readable UTF-8 file") from None
    if not content:
        raise ConfigurationError(f"--text {file}: it is empty: give a text of some thousand words")
    return content


def _figures(names: Sequence[str], setup: Setup, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Every contender's figures; they and the reference read window after window."""
    measured = {name: _Measured() for name in names}
    with ExitStack() as running:
        reference = running.enter_context(start(REFERENCE, setup))
        contenders = {name: running.enter_context(start(name, setup)) for name in names}
        for window in tqdm(windows, desc="windows", leave=False, disable=None):
            expected = reference.call("log_probabilities", window)
            for name, contender in contenders.items():
                measured[name].add(expected, contender.call("log_probabilities", window))
        return {name: measured[name].figures() | {"facts": contenders[name].call("facts")} for name in names}


class _Measured:
    """Divergence and agreement of one contender, row by row."""

    def __init__(self) -> None:
        self._divergences: list[npt.NDArray[np.float64]] = []
        self._agreements: list[npt.NDArray[np.bool_]] = []

    def add(self, expected: LogProbabilities, found: LogProbabilities) -> None:
        self._divergences.append(divergence(expected, found))
        self._agreements.append(expected.argmax(axis=1) == found.argmax(axis=1))

    def figures(self) -> dict[str, Any]:
        kl, same = np.concatenate(self._divergences), np.concatenate(self._agreements)
        return {
            "mean KL": float(f"{kl.mean():.4g}"),
            "standard error of the mean KL": float(f"{kl.std() / len(kl) ** 0.5:.2g}"),
            "99th percentile of KL": float(f"{np.quantile(kl, 0.99):.4g}"),
            "top-1 agreement": float(f"{same.mean():.5g}"),
        }


def divergence(reference: LogProbabilities, other: LogProbabilities) -> npt.NDArray[np.float64]:
    """KL(reference || other) of each row in nats, float64 [T]; both are log probabilities [T, vocab].

    Other engines pad the vocabulary at times: columns beyond the shorter one are left out.
    """
    width = min(reference.shape[1], other.shape[1])
    own = reference[:, :width]
    terms = np.exp(own) * (own - other[:, :width])
    # A sum of thousands of roundings may come out a little below zero, where no divergence is.
    result: npt.NDArray[np.float64] = np.maximum(terms.sum(axis=1, dtype=np.float64), 0.0)
    return result


def markdown(record: report.Record) -> str:
    """The record as a page."""
    rows = [
        [
            name,
            f"{figures['mean KL']:.3g} ± {figures['standard error of the mean KL']:.1g}",
            f"{figures['99th percentile of KL']:.3g}",
            f"{figures['top-1 agreement']:.2%}",
        ]
        for name, figures in record["contenders"].items()
    ]
    text = record["text"]
    return report.page(
        f"Quality of {record['checkpoint']['name']}",
        report.table(["", "mean KL (nats)", "99th percentile", "same likeliest token"], rows),
        f"Distributions after each of {text['tokens']} tokens of `{text['name']}`, in windows of {text['window']} that "
        f"are each read from an empty cache, against the same file's on {record['reference']}. The mean KL divergence "
        "is that of the contender from the reference, with its standard error.",
        *circumstances_section(record),
    )
