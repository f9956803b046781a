"""How fast a model reads prompts and writes replies, through the offline API."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pocketllm.bench.report import circumstances
from pocketllm.config import EngineArgs
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams

PROMPT_TOKENS = 512
REPLY_TOKENS = 64
SEQUENCES = (1, 8)


NAME = "generate"
HELP = "How fast a model reads prompts and writes replies."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("--model", default=EngineArgs().model, help="name, path or Hugging Face id")
    parser.add_argument("--backend", default="auto", help="auto or a backend's name")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument("--json", action="store_true", help="print a record instead of a table")


def run(given: argparse.Namespace) -> int:
    """Measure and print."""
    args = EngineArgs(model=given.model, backend=given.backend, threads=given.threads, max_model_len=1024)
    with LLM(args) as llm:
        figures = measure(llm, given.repeat)
        record = {"circumstances": circumstances(), "capabilities": _plain(llm.capabilities), "figures": figures}
    print(json.dumps(record, indent=2) if given.json else _table(record))
    return 0


def measure(llm: LLM, repeat: int) -> dict[str, float]:
    """Medians over `repeat` runs, in tokens a second."""
    prompt = _prompt(llm, PROMPT_TOKENS)
    _timed(llm, [prompt[:8]], 2)  # what is done once, on the first step, is not counted
    figures = {f"prefill {PROMPT_TOKENS}": _median(repeat, lambda: PROMPT_TOKENS / _timed(llm, [prompt], 1))}
    for count in SEQUENCES:
        prompts = [prompt[:16]] * count
        figures[f"decode, {count} at once"] = _median(repeat, partial(_decode_rate, llm, prompts))
    return figures


def _decode_rate(llm: LLM, prompts: list[list[int]]) -> float:
    """Tokens a second over the steps after the first; the first token comes with the prompt."""
    whole = _timed(llm, prompts, REPLY_TOKENS)
    first = _timed(llm, prompts, 1)
    return len(prompts) * (REPLY_TOKENS - 1) / (whole - first)


def _timed(llm: LLM, prompts: list[list[int]], reply_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=reply_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def _prompt(llm: LLM, tokens: int) -> list[int]:
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
    return llm.tokenize(text * tokens)[:tokens]


def _median(repeat: int, run: Callable[[], float]) -> float:
    return statistics.median(run() for _ in range(repeat))


def _plain(value: Any) -> dict[str, Any]:
    return {name: content for name, content in dataclasses.asdict(value).items() if name != "details"}


def _table(record: dict[str, Any]) -> str:
    facts = [f"{name}: {value}" for name, value in record["circumstances"].items()]
    engine = record["capabilities"]
    facts.append(f"backend: {engine['backend']} on {engine['device']}, {engine['dtype']}")
    rows = [f"| {name} | {value:.1f} |" for name, value in record["figures"].items()]
    return "\n".join([*facts, "", "| work | tokens/s |", "| --- | --- |", *rows])
