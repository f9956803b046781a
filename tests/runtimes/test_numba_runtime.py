"""The Numba runtime: golden tokens, and the same bits whatever runs beside a sequence and however it is chunked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pocketllm import LLM, SamplingParams
from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.builds import QUEUE
from pocketllm.kernels.jit.toolchain_numba import Kernel
from pocketllm.models.family import family
from pocketllm.runtimes.base import Runtime, RuntimeOptions
from pocketllm.runtimes.numba_runtime import NumbaRuntime
from pocketllm.runtimes.registry import select_backend
from tests.forward import all_logits, as_numpy, chunk_batch, greedy, load_runtime
from tests.golden import FOLDER, golden, tiny_checkpoints
from tests.models.test_against_transformers import save_tiny

TRUNK = (
    "llama",
    "llama_bf16",
    "llama_rope_llama3",
    "llama_rope_yarn",
    "qwen2",
    "qwen2_sharded",
    "qwen3",
    "qwen3_5",
    "qwen3_5_wrapped",
)
LOGITS_TOLERANCE = 1e-3

# What rounding activations to int8 does to the real model's logits, over its golden prompts and replies: at most 2.6,
# as a root mean square 0.18 to 0.36; among the 50 largest of a prompt's end at most 0.74. Tokens are compared up to the
# first golden margin below `SURE`; the widest margin at which another token was taken is 0.29.
INT8_TOP = 1.0
SURE = 0.5


@pytest.mark.parametrize("folder", tiny_checkpoints(*TRUNK), ids=lambda folder: folder.name)
def test_tiny_checkpoint(folder: Path) -> None:
    runtime, record = load_runtime(folder, backend="numba"), golden(folder)
    arrays = load_file(folder / "golden.safetensors")
    for prompt in record["prompts"]:
        logits = all_logits(runtime, prompt["ids"])
        np.testing.assert_allclose(logits[-1], arrays[f"last_logits.{prompt['name']}"], rtol=0, atol=LOGITS_TOLERANCE)
        np.testing.assert_array_equal(all_logits(runtime, prompt["ids"], [1, 40]), logits)
        tokens, rows = greedy(runtime, prompt["ids"], record["n_new"])
        assert tokens == prompt["greedy"]
        np.testing.assert_array_equal(rows[0], logits[-1])


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, {}, made)
    return made


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    loaded = load_runtime(folder, backend="numba")
    yield loaded
    loaded.close()


tokens = st.lists(st.integers(0, 319), min_size=1, max_size=60)


def mixed_logits(runtime: Runtime, sequences: list[list[int]], seed: int) -> list[np.ndarray]:
    """Each sequence's logits, from random chunks of all of them together, in randomly placed blocks."""
    random = Random(seed)
    blocks = list(range(4 * len(sequences)))
    random.shuffle(blocks)
    tables = [blocks[4 * i : 4 * i + 4] for i in range(len(sequences))]
    past = [0] * len(sequences)
    rows: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(done < len(sequence) for done, sequence in zip(past, sequences, strict=True)):
        pieces = []
        for i, sequence in enumerate(sequences):
            if piece := sequence[past[i] : past[i] + random.choice([0, 1, 1, 7, 40])]:
                pieces.append((i, piece))
        random.shuffle(pieces)
        if not pieces:
            continue
        logits = as_numpy(runtime.forward(chunk_batch([(piece, past[i], tables[i]) for i, piece in pieces])).logits)
        start = 0
        for i, piece in pieces:
            rows[i].append(logits[start : start + len(piece)])
            start, past[i] = start + len(piece), past[i] + len(piece)
    return [np.concatenate(found) for found in rows]


@given(st.lists(tokens, min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=15)
def test_mixed_chunks_of_several_sequences_give_the_bits_of_each_alone(runtime, sequences, seed) -> None:
    for sequence, found in zip(sequences, mixed_logits(runtime, sequences, seed), strict=True):
        np.testing.assert_array_equal(found, all_logits(runtime, sequence))


@given(tokens)
@settings(max_examples=5)
def test_logits_are_those_of_the_torch_runtime(folder, runtime, sequence) -> None:
    reference = load_runtime(folder)
    np.testing.assert_allclose(all_logits(runtime, sequence), all_logits(reference, sequence), rtol=0, atol=1e-4)


THREADS = """
import hashlib, json, sys
from pathlib import Path
from random import Random
from tests.forward import load_runtime
from tests.runtimes.test_numba_runtime import mixed_logits, with_threads
path, counts = Path(sys.argv[1]), (7, 1, 2, 3)
random = Random(1)
sequences = [[random.randrange(320) for _ in range(random.randrange(30, 60))] for _ in range(5)]
digests = []
for threads in counts:
    rows = mixed_logits(with_threads(path, threads), sequences, threads)
    digests.append(hashlib.sha256(b"".join(array.tobytes() for array in rows)).hexdigest())
print(json.dumps(digests))
"""


def with_threads(path: Path, threads: int) -> Runtime:
    with open_checkpoint(path) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        runtime = NumbaRuntime(config, RuntimeOptions(device="cpu", dtype="float32", block_size=16, threads=threads))
        runtime.load(checkpoint, lambda *_: None)
    runtime.allocate(64, 8)
    return runtime


def elsewhere(code: str, *arguments: str, **environment: str) -> str:
    """The last line that another process prints."""
    root = Path(__file__).resolve().parents[2]
    variables = {**os.environ, "PYTHONPATH": str(root), **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_bits_are_the_same_at_1_2_3_and_7_threads(tmp_path: Path) -> None:
    """In a wide model, whose products are shared between threads; each count with other chunks and blocks."""
    save_tiny("llama", {"hidden_size": 128, "intermediate_size": 384}, tmp_path)
    assert len(set(json.loads(elsewhere(THREADS, str(tmp_path), NUMBA_NUM_THREADS="7")))) == 1


def test_more_threads_than_there_are_in_the_pool_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="set NUMBA_NUM_THREADS=1000 in the environment"):
        with_threads(folder, 1000)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from pocketllm import LLM, SamplingParams
with LLM(sys.argv[1], backend="numba", max_model_len=256) as llm:
    result = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0]
print(len(result.token_ids))
"""


@pytest.mark.parametrize("folder", tiny_checkpoints("llama"), ids=lambda folder: folder.name)
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_an_environment_without_torch_serves(folder: Path, layer: str) -> None:
    assert elsewhere(WITHOUT_TORCH, str(folder), NUMBA_THREADING_LAYER=layer) == "5"


def test_nothing_is_compiled_after_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_runtime(folder, backend="numba")
    assert isinstance(runtime, NumbaRuntime)
    assert runtime.builds is not None
    monkeypatch.setattr(Kernel, "build", lambda self: pytest.fail(f"{self.name} is built after loading"))
    for length in (1, 17, 513):
        blocks = list(range(-(-length // 16)))
        output = runtime.forward(chunk_batch([([7] * length, 0, blocks)]))
        runtime.score(output.logits, np.zeros(length, dtype=np.int32), 5)
    output = runtime.forward(chunk_batch([([1], 0, [0]), ([2, 3], 0, [1])]))
    runtime.take_rows(output.logits, np.array([1], dtype=np.int32))
    assert QUEUE.build_all(lambda *_: None).compiled == 0


def test_refusals_and_choice_name_their_reasons(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)

    def options(device: str, dtype: str) -> RuntimeOptions:
        return RuntimeOptions(device=device, dtype=dtype, block_size=16)

    assert NumbaRuntime.supports(config, options("cpu", "float32")) == ()
    assert "bfloat16" in NumbaRuntime.supports(config, options("cpu", "bfloat16"))[0]
    assert "cuda:0" in NumbaRuntime.supports(config, options("cuda:0", "float32"))[0]
    assert select_backend("auto", config, options("cpu", "float32")).backend.name == "numba"
    chosen = select_backend("auto", config, options("cpu", "bfloat16"))
    assert chosen.backend.name == "torch"
    assert "numba: dtype bfloat16" in chosen.reason


@pytest.fixture(scope="module")
def smollm2(real_model: Path) -> Iterator[Runtime]:
    loaded = load_runtime(real_model, backend="numba")
    yield loaded
    loaded.close()


def smollm2_prompts() -> list[dict]:
    if FOLDER is None:
        return []
    return json.loads((FOLDER / "smollm2" / "golden.json").read_text())["prompts"]


@pytest.mark.parametrize("prompt", smollm2_prompts(), ids=lambda prompt: prompt["name"])
def test_real_model(smollm2: Runtime, real_model: Path, prompt: dict) -> None:
    found, rows = greedy(smollm2, prompt["ids"], len(prompt["greedy"]))
    error = rows[0][prompt["top50_ids"]] - prompt["top50_logits"]
    assert np.abs(error).max() <= INT8_TOP
    for step, (token, expected, margin) in enumerate(zip(found, prompt["greedy"], prompt["margins"], strict=True)):
        if token != expected:
            assert margin < SURE, f"step {step}: {token} instead of {expected}, margin {margin}"
            print(f"near tie at step {step}, golden margin {margin}")
            break


def test_real_model_in_mixed_batches(smollm2: Runtime, real_model: Path) -> None:
    random = Random(2)
    sequences = [[random.randrange(49152) for _ in range(size)] for size in (60, 3, 41)]
    for sequence, found in zip(sequences, mixed_logits(smollm2, sequences, 3), strict=True):
        np.testing.assert_array_equal(found, all_logits(smollm2, sequence))


def test_real_model_says_what_it_should(real_model: Path) -> None:
    with LLM(str(real_model), backend="numba", max_model_len=512) as llm:
        greedily = SamplingParams(temperature=0.0, max_tokens=14)
        assert llm.generate("Here is the English alphabet: ABC", greedily)[0].text == "DEFGHIJKLMNOPQRSTUVWXYZ"
        chat = llm.chat([{"role": "user", "content": "What is 2+2?"}], SamplingParams(temperature=0.0, max_tokens=40))
        assert (chat[0].text, chat[0].finish_reason) == ("The answer to this classic math problem is 4.", "stop")
