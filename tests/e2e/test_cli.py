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
from tests.cli.terminal import CTRL_C, CTRL_D, chat

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


def test_generate_from_a_file(answer: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"{PROMPT}\n\nWater is made of\n", encoding="utf-8")
    done = run_cli("generate", "--file", str(path), *GREEDY, "--json", "--logprobs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["prompt"], second["prompt"]) == (PROMPT, "Water is made of")
    assert first["text"] == answer["text"]
    assert first["token_ids"] == answer["token_ids"]
    for output in (first, second):
        assert "".join(entry["token"] for entry in output["logprobs"]) == output["text"]
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in output["logprobs"])


def test_inspect() -> None:
    done = run_cli("inspect", "smollm2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["model_type"], found["container"], found["parameters"]) == ("llama", "gguf", 134_515_008)
    assert (found["context_length"], found["vocab_size"]) == (8192, 49152)
    assert (found["eos_token_ids"], found["eos_source"]) == ([0, 2], "config")
    assert found["tokenizer"]["add_bos_token"] is False
    assert found["cache"]["bytes_per_token"] == 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, width, float32
    assert found["formats"]["Q4_1"]["tensors"] == 210


def test_a_prompt_that_cannot_fit() -> None:
    message = error_of(run_cli("generate", PROMPT, "--max-model-len", "8", "--max-tokens", "8"), 1)
    assert message.startswith("This server's maximum context length is 8 tokens")


def test_chat_over_a_pipe() -> None:
    done = run_cli("chat", *GREEDY, "--stats", stdin="Hello\n/system Be brief.\nWhat is the capital of France?\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert "Paris" in done.stdout
    assert len(re.findall(r"^\(\d+ tokens, the first after .* tokens/s\)$", done.stderr, re.MULTILINE)) == 2


def test_chat_on_a_terminal(answer: dict[str, object]) -> None:
    with chat("--temperature", "0", "--max-tokens", "200", model="real") as opened:
        opened.type("Write a very long story about a lighthouse.\n")
        opened.shows("lighthouse")  # what was typed
        opened.shows("lighthouse")
        opened.type(CTRL_C)
        opened.shows("\n(stopped)\n> ")
        opened.type("Say hello.\\\nJust that.\n")
        assert opened.shows("\n> ")
        opened.type(CTRL_D)
        opened.ends(0)


def test_a_reader_that_leaves_ends_a_reply() -> None:
    command = [sys.executable, "-m", "pocketllm", "generate", PROMPT, "--seed", "1", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/") as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert len(program.stdout.read(20)) == 20
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 1


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
