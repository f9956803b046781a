"""The program on the real model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.running import error_of, run_cli

pytestmark = pytest.mark.usefixtures("real_model")

GREEDY = ("--temperature", "0", "--max-tokens", "8")
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def answer(real_model: Path) -> dict[str, object]:
    """A greedy reply as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POCKETLLM_CACHE_DIR", str(real_model.parents[2]))
        done = run_cli("generate", PROMPT, *GREEDY, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_generate_as_json(answer: dict[str, object]) -> None:
    assert str(answer["text"]).startswith(" Paris")
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13, "cached_tokens": 0}
    assert isinstance(answer["seed"], int)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_generate_from_standard_input(answer: dict[str, object], stream: str) -> None:
    done = run_cli("generate", "-", *GREEDY, stream, stdin=PROMPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{answer['text']}\n"


def test_a_prompt_that_cannot_fit() -> None:
    message = error_of(run_cli("generate", PROMPT, "--max-model-len", "8", "--max-tokens", "8"), 1)
    assert message.startswith("This server's maximum context length is 8 tokens")


def test_chat_over_a_pipe() -> None:
    done = run_cli("chat", *GREEDY, "--stats", stdin="Hello\n/system Be brief.\nWhat is the capital of France?\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert "Paris" in done.stdout
    assert len(re.findall(r"^\(\d+ tokens, the first after .* tokens/s\)$", done.stderr, re.MULTILINE)) == 2


def test_ctrl_c_ends_a_reply() -> None:
    command = [sys.executable, "-m", "pocketllm", "generate", PROMPT, "--seed", "1", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.read(1)
        program.send_signal(signal.SIGINT)
        rest = program.stdout.read()
        assert program.stderr.read() == ""
    assert program.returncode == 130
    assert rest.endswith("\n")


def test_serve_answers_and_ends(answer: dict[str, object]) -> None:
    command = [sys.executable, "-m", "pocketllm", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as program:
        assert program.stderr is not None
        try:
            ready = next(line for line in program.stderr if "ready: smollm2 at" in line)
            (url,) = re.findall(r"http://\S+", ready)
            body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                completion = json.load(response)
        finally:
            program.send_signal(signal.SIGTERM)
            program.stderr.read()
    assert completion["choices"][0]["text"] == answer["text"]
    assert program.returncode == 0
