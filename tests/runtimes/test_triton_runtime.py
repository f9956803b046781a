"""The Triton runtime: what it runs on, and what is compiled when. Its tokens and bits: `test_gpu_runtimes`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pocketllm.kernels.checking.arrays import backend
from pocketllm.models.family import family
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.registry import select_backend
from pocketllm.runtimes.triton_runtime import TritonRuntime
from tests.forward import load_runtime
from tests.models.test_against_transformers import save_tiny

# A few layers' float32 products, summed in another order.
CLOSE = 1e-4
GOLDEN_TOLERANCE = 1e-3
DEVICE = backend("triton").device
CPU = RuntimeOptions(device="cpu", dtype="float32", block_size=16)


def test_what_is_launched_while_loading_runs(tmp_path: Path) -> None:
    save_tiny("qwen2", {"num_hidden_layers": 2}, tmp_path)
    runtime = load_runtime(tmp_path, backend="triton", device=DEVICE)
    assert isinstance(runtime, TritonRuntime)
    seen: list[tuple[str, int, int]] = []
    runtime.compile_kernels(lambda *step: seen.append(step))
    assert seen == [("kernels", done, 3) for done in range(4)]


def tiny_llama():  # type: ignore[no-untyped-def]
    return family("llama").parse_config("hf", family("llama").tiny_config())


@pytest.mark.skipif(DEVICE != "cpu", reason="this process has Triton as a compiler")
def test_on_a_cpu_it_is_chosen_by_name_only() -> None:
    assert select_backend("triton", tiny_llama(), CPU).backend.name == "triton"
    chosen = select_backend("auto", tiny_llama(), CPU)
    assert chosen.backend.name != "triton"
    assert "triton: on cpu only when asked for by name" in chosen.reason


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda:63", "PyTorch sees"), ("xpu", "runs on CUDA devices, and on cpu through")]
)
def test_devices_that_are_not_there_are_refused_by_name(device: str, reason: str) -> None:
    refusals = TritonRuntime.supports(tiny_llama(), RuntimeOptions(device=device, dtype="float32", block_size=16))
    assert len(refusals) == 1
    assert device in refusals[0]
    assert reason in refusals[0]


def test_a_compiler_cannot_become_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.runtimes.triton_runtime.loaded_as", lambda: "compiler")
    (refusal,) = TritonRuntime.supports(tiny_llama(), CPU)
    assert "TRITON_INTERPRET=1" in refusal


FRESH = """
import sys
from pocketllm.kernels.jit import loading_triton
from pocketllm.models.family import family
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.triton_runtime import TritonRuntime

assert "triton" not in sys.modules
config = family("llama").parse_config("hf", family("llama").tiny_config())
options = RuntimeOptions(device="cpu", dtype="float32", block_size=16)
{before}
print(TritonRuntime.supports(config, options))
if not TritonRuntime.supports(config, options):
    TritonRuntime(config, options)
print(loading_triton.loaded_as())
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", ["()", "interpreter"]), ("import triton", ["imported it as a compiler", "compiler"])],
    ids=["first", "after triton"],
)
def test_the_choice_of_a_fresh_process(before: str, expected: list[str]) -> None:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", FRESH.format(before=before)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    for line, part in zip(done.stdout.splitlines(), expected, strict=True):
        assert part in line
    assert ("very slow" in done.stderr) == (not before)
