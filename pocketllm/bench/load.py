"""A server under load: many streams at once, their latencies and throughput, and whether load changes their texts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import numpy as np

from pocketllm.bench import arguments, prompts, report
from pocketllm.bench.circumstances import Circumstances, unrest
from pocketllm.bench.server_process import loopback_address, model_id, served
from pocketllm.bench.streams import Client, Stream
from pocketllm.errors import ConfigurationError

NAME = "load"
HELP = "An HTTP server with many streams: latency, throughput, and texts that differ from their solo runs."

MOST_STREAMS, MOST_TOKENS, MOST_REPEATS, MOST_SECONDS = 256, 1024, 20, 3600
PROMPT_CHARACTERS = 160
GIVEN_URL = "given by --url"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    arguments.add_model_arguments(parser)
    positive = arguments.positive
    parser.add_argument("--url", type=loopback_address, help="a running server on this machine instead of one of ours")
    parser.add_argument("--streams", type=positive, default=8, help=f"streams at once, to {MOST_STREAMS} (default 8)")
    parser.add_argument("--tokens", type=positive, default=64, help=f"tokens of each, to {MOST_TOKENS} (default 64)")
    parser.add_argument("--repeat", type=positive, default=3, help=f"runs, to {MOST_REPEATS} (default 3)")
    parser.add_argument("--seconds", type=positive, default=600, help=f"time for all, to {MOST_SECONDS} (default 600)")
    report.add_output_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, print, write."""
    _check_bounds(given)
    circumstances = Circumstances()
    figures = {}
    for name in [GIVEN_URL] if given.url else given.backend:
        with _server(given, name) as address:
            client = Client(address, model_id(address), given.tokens, time.monotonic() + given.seconds)
            figures[name] = measure(client, _prompts(given.streams), given.repeat)
    record = {
        "benchmark": NAME,
        "model": client.model,
        "threads": given.threads,
        "work": {"streams": given.streams, "tokens": given.tokens, "repeat": given.repeat},
        "servers": figures,
        "circumstances": circumstances.as_dict(),
    }
    report.publish(record, markdown, given)
    return 0


def _check_bounds(given: argparse.Namespace) -> None:
    for name, most in (
        ("streams", MOST_STREAMS),
        ("tokens", MOST_TOKENS),
        ("repeat", MOST_REPEATS),
        ("seconds", MOST_SECONDS),
    ):
        if getattr(given, name) > most:
            raise ConfigurationError(f"--{name} is {getattr(given, name)}: give at most {most}")


def _server(given: argparse.Namespace, backend: str) -> AbstractContextManager[str]:
    if given.url:
        return nullcontext(given.url)
    path = arguments.checkpoint_path(given.model)
    flags = {
        "model": path,
        "backend": backend,
        "device": given.device,
        "threads": given.threads,
        "parallel": given.streams,
        # The text is ASCII: a token stands for at least one character of it, but for a special one at either end.
        "max-model-len": PROMPT_CHARACTERS + given.tokens + 2,
    }
    return served([part for name, value in flags.items() for part in (f"--{name}", str(value))])


def _prompts(count: int) -> list[str]:
    """Passages of the text, each from another place."""
    text = prompts.text()
    step = max(1, len(text) // count)
    return [(text * 2)[place : place + PROMPT_CHARACTERS] for place in range(0, step * count, step)]


def measure(client: Client, texts: Sequence[str], repeat: int) -> dict[str, Any]:
    """Every prompt alone, which also warms the server up, and then all at once, `repeat` times."""
    solo = [client.stream(text) for text in texts]
    rounds = [client.together(texts) for _ in range(repeat)]
    together = [stream for streams in rounds for stream in streams]
    differ = [sum(stream.text != alone.text for stream, alone in zip(streams, solo, strict=True)) for streams in rounds]
    return {
        "tokens/s": {
            "median": _digits(median(map(_throughput, rounds))),
            "runs": list(map(_digits, map(_throughput, rounds))),
        },
        "tokens/s alone": _digits(median(_throughput([stream]) for stream in solo)),
        "first token, ms": _quantiles([stream.first for stream in together]),
        "first token alone, ms": _quantiles([stream.first for stream in solo]),
        "between tokens, ms": _quantiles([gap for stream in together for gap in stream.gaps]),
        "between tokens alone, ms": _quantiles([gap for stream in solo for gap in stream.gaps]),
        "texts that differ from their solo runs": differ,
    }


def _throughput(streams: Sequence[Stream]) -> float:
    """Tokens a second from the first request to the last piece."""
    seconds = max(stream.arrivals[-1] for stream in streams) - min(stream.began for stream in streams)
    return sum(stream.tokens for stream in streams) / seconds


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:  # replies of one piece have nothing between them
        return {}
    return {f"p{percent}": _digits(float(np.percentile(seconds, percent)) * 1e3) for percent in (50, 99)}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def markdown(record: report.Record) -> str:
    """The record as a page."""
    work = record["work"]
    header = ["", "tokens/s", "alone", "first token, p50 / p99", "between tokens, p50 / p99", "texts that differ"]
    rows = [
        [
            name,
            f"{figures['tokens/s']['median']:.0f}",
            f"{figures['tokens/s alone']:.0f}",
            _milliseconds(figures["first token, ms"]),
            _milliseconds(figures["between tokens, ms"]),
            f"{sum(figures['texts that differ from their solo runs'])} of {work['streams'] * work['repeat']}",
        ]
        for name, figures in record["servers"].items()
    ]
    return report.page(
        f"{record['model']} served to {work['streams']} streams",
        "" if GIVEN_URL in record["servers"] else unrest(record["circumstances"]),
        report.table(header, rows),
        f"Greedy completions of {work['tokens']} tokens over HTTP, all streams at once, {work['repeat']} times. "
        "Throughput counts from the first request to the last piece; a text differs where it is not the one that the "
        "same prompt got alone.",
        "## Circumstances",
        report.facts(record["circumstances"] | {"threads": record["threads"]}),
    )


def _milliseconds(quantiles: dict[str, float]) -> str:
    return " / ".join(f"{value:.0f} ms" for value in quantiles.values()) or "-"
