"""The Triton runtime: the reference's tokens, and the same bits however a batch is made up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors.numpy import load_file

from pocketllm.models.family import family, model_types
from pocketllm.runtimes.base import Runtime, RuntimeOptions
from pocketllm.runtimes.registry import select_backend
from pocketllm.runtimes.triton_runtime import TritonRuntime
from tests.forward import all_logits, as_numpy, chunk_batch, greedy, load_runtime
from tests.golden import golden, tiny_checkpoints
from tests.kernels.backends import BACKENDS
from tests.models.test_against_transformers import save_tiny
from tests.runtimes.test_torch_runtime import rows_for

# A few layers' float32 products, summed in another order.
CLOSE = 1e-4
GOLDEN_TOLERANCE = 1e-3
DEVICE = BACKENDS["triton"].device
CPU = RuntimeOptions(device="cpu", dtype="float32", block_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a window, head groups of three and two layers."""
    path = tmp_path_factory.mktemp("qwen2")
    save_tiny("qwen2", {"num_hidden_layers": 2, "sliding_window": 7}, path)
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runtime(request: pytest.FixtureRequest, folder: Path) -> Iterator[Runtime]:
    loaded = load_runtime(folder, backend="triton", device=DEVICE, dtype=request.param)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("model_type", model_types())
def test_tokens_are_those_of_the_reference(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, {"num_hidden_layers": 2}, tmp_path)
    triton, torch = load_runtime(tmp_path, backend="triton", device=DEVICE), load_runtime(tmp_path)
    prompt = np.random.default_rng(2).integers(0, 320, size=6).tolist()
    tokens, logits = greedy(triton, prompt, 4)
    expected, reference = greedy(torch, prompt, 4)
    assert tokens == expected
    np.testing.assert_allclose(logits, reference, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("path", tiny_checkpoints("llama", "qwen2", "qwen3"), ids=lambda path: path.name)
def test_golden_logits_and_tokens(path: Path) -> None:
    runtime = load_runtime(path, backend="triton", device=DEVICE)
    prompt = next(prompt for prompt in golden(path)["prompts"] if prompt["name"] == "len7")
    logits = all_logits(runtime, prompt["ids"], [1])
    expected = load_file(path / "golden.safetensors")["all_logits.len7"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=GOLDEN_TOLERANCE)
    assert greedy(runtime, prompt["ids"], 3)[0] == prompt["greedy"][:3]


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_company_change_no_bit(runtime: Runtime, seed: int) -> None:
    random = Random(seed)
    sequences = [[random.randrange(320) for _ in range(random.randrange(1, 20))] for _ in range(3)]
    alone = [all_logits(runtime, sequence) for sequence in sequences]
    blocks = list(range(6))
    random.shuffle(blocks)
    tables = [blocks[2 * i : 2 * i + 2] for i in range(3)]
    past = [0, 0, 0]
    while any(done < len(sequence) for done, sequence in zip(past, sequences, strict=True)):
        sizes = [random.choice([0, 1, 5, 20]) for _ in sequences]
        pieces = [(i, sequences[i][past[i] : past[i] + size]) for i, size in enumerate(sizes)]
        parts = [(i, piece) for i, piece in pieces if piece]
        if not parts:
            continue
        logits = as_numpy(runtime.forward(chunk_batch([(piece, past[i], tables[i]) for i, piece in parts])).logits)
        for i, piece in parts:
            own, logits = logits[: len(piece)], logits[len(piece) :]
            np.testing.assert_array_equal(own, alone[i][past[i] : past[i] + len(piece)])
            past[i] += len(piece)


def test_draws_and_scores_agree_with_the_logits(runtime: Runtime) -> None:
    output = runtime.forward(chunk_batch([([3, 1, 4], 0, [0])]))
    logits = as_numpy(output.logits).astype(np.float64)
    ids = runtime.sample(output.logits, rows_for(3))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    scores = runtime.score(output.logits, ids, 3)
    np.testing.assert_allclose(scores.logsumexp, np.log(np.exp(logits).sum(axis=1)), rtol=1e-6)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :3])
    some = runtime.take_rows(output.logits, np.array([2, 0], np.int32))
    np.testing.assert_array_equal(as_numpy(some), as_numpy(output.logits)[[2, 0]])


def test_what_is_launched_while_loading_runs(folder: Path) -> None:
    runtime = load_runtime(folder, backend="triton", device=DEVICE)
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
