"""``pocketllm generate``: complete a prompt, or every line of a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pocketllm.cli import flags
from pocketllm.errors import ConfigurationError
from pocketllm.protocol.openai.logprobs import chat_logprobs
from pocketllm.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pocketllm.llm import LLM

NAME = "generate"
HELP = "Complete prompts as they stand; chat puts messages into the model's own template."

STANDARD_INPUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("prompt", nargs="?", help="the text to go on from; - reads it from standard input")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="complete every line of a file that is not blank; - is standard input"
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="write the text while it grows (default for one prompt), or once it is whole",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write a JSON object a prompt, each on its line: text, token ids, finish reason, seed and usage",
    )
    flags.add_sampling_flags(parser, flags.LOGPROBS_FLAG)
    flags.add_engine_flags(parser)


def run(given: argparse.Namespace) -> int:
    """Load the model and complete the prompts."""
    _check(given)
    params = flags.sampling_params(given)
    engine_args = flags.engine_args(given)
    prompts = [_prompt(given.prompt)] if given.file is None else read_prompts(given.file)

    from pocketllm.llm import LLM

    with LLM(engine_args) as llm:
        if given.json:
            write_json(llm, prompts, params, sys.stdout)
        elif given.stream is False or given.file is not None:
            write_texts(llm, prompts, params, sys.stdout)
        else:
            write_stream(llm, prompts[0], params, sys.stdout)
    return 0


def _check(given: argparse.Namespace) -> None:
    if (given.prompt is None) == (given.file is None):
        raise ConfigurationError("give a prompt, or --file with one prompt a line")
    if given.stream and given.json:
        raise ConfigurationError("--json writes whole objects: leave --stream out")
    if given.stream and given.file is not None:
        raise ConfigurationError("the replies to a --file are written whole: leave --stream out")
    if given.logprobs is not None and not given.json:
        raise ConfigurationError("--logprobs shows in JSON only: add --json")


def _prompt(given: str) -> str:
    return _read(Path(given)) if given == STANDARD_INPUT else given


def read_prompts(path: Path) -> list[str]:
    """The lines of a file, or of standard input, that are not blank, without their ends.

    Raises:
        ConfigurationError: it cannot be read, is not UTF-8 or has no prompt.
    """
    prompts = [line.removesuffix("\r") for line in _read(path).split("\n") if line.strip()]
    if not prompts:
        raise ConfigurationError(f"{_name(path)}: there is no prompt in it: write one a line")
    return prompts


def _read(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == STANDARD_INPUT else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}: give a file that can be read") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{_name(path)}: byte {error.start} is not UTF-8: give text") from None


def _name(path: Path) -> str:
    return "standard input" if str(path) == STANDARD_INPUT else str(path)


def write_stream(llm: LLM, prompt: str, params: SamplingParams, out: TextIO) -> None:
    """Write the reply as it comes, and end the line."""
    events = llm.generate_stream(prompt, params)
    try:
        for event in events:
            out.write(event.text)
            out.flush()
    finally:
        out.write("\n")


def write_texts(llm: LLM, prompts: Sequence[str], params: SamplingParams, out: TextIO) -> None:
    """Write the finished replies, each with the end of a line."""
    for output in llm.generate(prompts, params):
        out.write(output.text + "\n")


def write_json(llm: LLM, prompts: Sequence[str], params: SamplingParams, out: TextIO) -> None:
    """Write the finished requests as JSON objects, each on one line."""
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        out.write(json.dumps({"prompt": prompt} | _as_json(output), ensure_ascii=False) + "\n")


def _as_json(output: RequestOutput) -> dict[str, object]:
    logprobs = chat_logprobs(output.logprobs)
    return {
        "request_id": output.request_id,
        "text": output.text,
        "token_ids": output.token_ids,
        "logprobs": None if logprobs is None else logprobs["content"],
        "finish_reason": output.finish_reason,
        "stop_match": output.stop_match,
        "prompt_token_ids": output.prompt_token_ids,
        "seed": output.seed,
        "usage": output.usage.as_dict(),
    }
