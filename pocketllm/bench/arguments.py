"""Command-line options that benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from pocketllm import env
from pocketllm.bench.circumstances import usable_cores
from pocketllm.checkpoint.store import ModelStore
from pocketllm.config import BACKENDS, EngineArgs


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, on which backends, with how many threads."""
    parser.add_argument("--model", default=EngineArgs().model, help="name, path or Hugging Face id")
    parser.add_argument(
        "--backend", type=backends, default=["auto"], metavar="NAME[,NAME]", help="auto, or backends' names"
    )
    parser.add_argument("--device", default="auto", help="where our backends compute: auto, cpu or cuda[:i]")
    parser.add_argument(
        "--threads", type=positive, default=usable_cores(), help="CPU threads of each (default: every core)"
    )


def backends(text: str) -> list[str]:
    """Names between commas; argparse's error where one is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in ("auto", *BACKENDS):
            raise argparse.ArgumentTypeError(f"{name!r} is no backend: give auto or some of {', '.join(BACKENDS)}")
    return names


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


def checkpoint_path(model: str) -> Path:
    """Where the model lies; ModelNotFoundError when it is not at hand."""
    return ModelStore(env.CACHE_DIR.read()).resolve(model)


def file_facts(path: Path) -> dict[str, object]:
    """The checkpoint's name and size; never its path."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {"name": path.stem if path.is_file() else path.name, "bytes": sum(file.stat().st_size for file in files)}
