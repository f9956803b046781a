"""Golden logits and tokens of independent origin: the tiny checkpoints of each family, and the real model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pocketllm.runtimes.base import Runtime
from tests.forward import all_logits, greedy, load_runtime
from tests.golden import FOLDER, golden, tiny_checkpoints

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

# What the real model's logits may differ by from the golden float32 run: both round, thirty layers deep.
REAL_TOLERANCE = 5e-3


@pytest.mark.parametrize("folder", tiny_checkpoints(*TRUNK), ids=lambda folder: folder.name)
def test_tiny_checkpoint(folder: Path) -> None:
    runtime = load_runtime(folder)
    record = golden(folder)
    arrays = load_file(folder / "golden.safetensors")
    for prompt in record["prompts"]:
        logits = all_logits(runtime, prompt["ids"], [1, 40])
        expected = arrays[f"last_logits.{prompt['name']}"]
        np.testing.assert_allclose(logits[-1], expected, rtol=0, atol=LOGITS_TOLERANCE)
        if prompt["name"] == "len7":
            np.testing.assert_allclose(logits, arrays["all_logits.len7"], rtol=0, atol=LOGITS_TOLERANCE)
        tokens, rows = greedy(runtime, prompt["ids"], record["n_new"])
        assert tokens == prompt["greedy"]
        ordered = np.sort(rows, axis=1)
        np.testing.assert_allclose(ordered[:, -1] - ordered[:, -2], prompt["margins"], atol=2 * LOGITS_TOLERANCE)


@pytest.fixture(scope="module")
def smollm2(real_model: Path) -> Runtime:
    return load_runtime(real_model)


def smollm2_prompts() -> list[dict]:
    if FOLDER is None:
        return []
    return json.loads((FOLDER / "smollm2" / "golden.json").read_text())["prompts"]


@pytest.mark.parametrize("prompt", smollm2_prompts(), ids=lambda prompt: prompt["name"])
def test_real_model(smollm2: Runtime, prompt: dict) -> None:
    """Tokens are compared up to the first step whose golden margin is within the error; near ties are printed."""
    tokens, rows = greedy(smollm2, prompt["ids"], len(prompt["greedy"]))
    np.testing.assert_allclose(rows[0][prompt["top50_ids"]], prompt["top50_logits"], rtol=0, atol=REAL_TOLERANCE)
    for step, (token, expected, margin) in enumerate(zip(tokens, prompt["greedy"], prompt["margins"], strict=True)):
        if token != expected:
            assert margin < 2 * REAL_TOLERANCE, f"step {step}: {token} instead of {expected}, margin {margin}"
            assert token == prompt["runner_up"][step]
            print(f"near tie at step {step}: runner-up taken, golden margin {margin}")
            break
