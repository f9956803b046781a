"""``pocketllm generate``: complete one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, TextIO

from pocketllm.cli import flags
from pocketllm.errors import ConfigurationError
from pocketllm.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pocketllm.llm import LLM

NAME = "generate"
HELP = "Complete a prompt as it stands; chat puts messages into the model's own template."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("prompt", help="the text to go on from; - reads it from standard input")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="write the text while it grows (default), or once it is whole",
    )
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object: text, token ids, finish reason, seed and usage"
    )
    flags.add_sampling_flags(parser)
    flags.add_engine_flags(parser)


def run(given: argparse.Namespace) -> int:
    """Load the model and complete the prompt."""
    if given.json and given.stream:
        raise ConfigurationError("--json writes one whole object: leave --stream out")
    params = flags.sampling_params(given)
    engine_args = flags.engine_args(given)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt

    from pocketllm.llm import LLM

    with LLM(engine_args) as llm:
        if given.json:
            write_json(llm, prompt, params, sys.stdout)
        elif given.stream is False:
            print(llm.generate(prompt, params)[0].text)
        else:
            write_stream(llm, prompt, params, sys.stdout)
    return 0


def write_stream(llm: LLM, prompt: str, params: SamplingParams, out: TextIO) -> None:
    """Write the reply as it comes, and end the line."""
    events = llm.generate_stream(prompt, params)
    try:
        for event in events:
            out.write(event.text)
            out.flush()
    finally:
        out.write("\n")


def write_json(llm: LLM, prompt: str, params: SamplingParams, out: TextIO) -> None:
    """Write the finished request as one JSON object on one line."""
    (output,) = llm.generate(prompt, params)
    out.write(json.dumps(_as_json(output), ensure_ascii=False) + "\n")


def _as_json(output: RequestOutput) -> dict[str, object]:
    return {
        "request_id": output.request_id,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_match": output.stop_match,
        "prompt_token_ids": output.prompt_token_ids,
        "seed": output.seed,
        "usage": output.usage.as_dict(),
    }
