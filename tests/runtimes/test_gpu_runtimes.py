"""The runtimes made for GPUs: the reference's tokens, and the same bits however a batch is made up.

Without a GPU Triton's kernels run in its interpreter and those in CUDA C in the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors.numpy import load_file

from pocketllm.kernels.checking.arrays import backend
from pocketllm.models.family import model_types
from pocketllm.runtimes.base import Runtime
from tests.forward import all_logits, as_numpy, chunk_batch, greedy, load_runtime
from tests.golden import golden, tiny_checkpoints
from tests.models.test_against_transformers import save_tiny
from tests.runtimes.test_torch_runtime import rows_for

# A few layers' float32 products, summed in another order.
CLOSE = 1e-4
GOLDEN_TOLERANCE = 1e-3
BACKENDS = ("triton", "cupy")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_wrapped")

# How much of a golden prompt's reply is compared, and how long prompts are: the interpreter is the slowest.
GOLDEN = {"triton": (("len7",), 3), "cupy": (("len1", "len7", "len33", "chat"), 24)}


def load(path: Path, name: str, dtype: str = "float32") -> Runtime:
    return load_runtime(path, backend=name, device=backend(name).device, dtype=dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a window, head groups of three and two layers."""
    path = tmp_path_factory.mktemp("qwen2")
    save_tiny("qwen2", {"num_hidden_layers": 2, "sliding_window": 7}, path)
    return path


RUNS = [(name, dtype) for name in BACKENDS for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def runtime(request: pytest.FixtureRequest, folder: Path) -> Iterator[Runtime]:
    loaded = load(folder, *request.param)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("model_type", model_types())
def test_tokens_are_those_of_the_reference(model_type: str, name: str, tmp_path: Path) -> None:
    save_tiny(model_type, {}, tmp_path)
    ours, torch = load(tmp_path, name), load_runtime(tmp_path)
    prompt = np.random.default_rng(2).integers(0, 320, size=6).tolist()
    tokens, logits = greedy(ours, prompt, 4)
    expected, reference = greedy(torch, prompt, 4)
    assert tokens == expected
    np.testing.assert_allclose(logits, reference, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("path", tiny_checkpoints(*FAMILIES), ids=lambda path: path.name)
def test_golden_logits_and_tokens(path: Path, name: str) -> None:
    runtime = load(path, name)
    names, count = GOLDEN[name]
    arrays = load_file(path / "golden.safetensors")
    for prompt in golden(path)["prompts"]:
        if prompt["name"] in names:
            logits = all_logits(runtime, prompt["ids"], [1])
            expected = arrays[f"last_logits.{prompt['name']}"]
            np.testing.assert_allclose(logits[-1], expected, rtol=0, atol=GOLDEN_TOLERANCE)
            assert greedy(runtime, prompt["ids"], count)[0] == prompt["greedy"][:count]


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
