"""Each family's tiny model, with random weights, against transformers' own implementation: the same logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pocketllm.models.family import family, model_types
from tests.forward import all_logits, load_runtime

# Float32 logits of a few layers of width 48: thousands of roundings of numbers near one.
TOLERANCE = 2e-5

# Transformers takes the delta rule in chunks, whose inverted triangular systems spread roundings further.
TOLERANCES = {"qwen3_5": 1e-4}

LLAMA_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with its own ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.1,
        "truncate": False,
    },
    "yarn with two scales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
    },
}


def variants() -> list[Any]:
    cases = [pytest.param(name, {}, id=name) for name in model_types()]
    cases += [
        pytest.param("llama", {"rope_scaling": value}, id=f"llama, {name}") for name, value in LLAMA_SCALINGS.items()
    ]
    return [
        *cases,
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama, biases"),
        pytest.param("llama", {"tie_word_embeddings": True}, id="llama, tied"),
        pytest.param("llama", {"num_key_value_heads": 4}, id="llama, a key head for each head"),
        pytest.param("qwen2", {"use_sliding_window": False}, id="qwen2, no window"),
        pytest.param("qwen3", {"attention_bias": True}, id="qwen3, biases"),
        pytest.param(
            "qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, id="qwen3, window"
        ),
    ]


def save_tiny(model_type: str, changes: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' model with random weights, saved; its configuration file is ours, to be read as it stands."""
    raw = copy.deepcopy(family(model_type).tiny_config()) | changes
    torch.manual_seed(20260101)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            values = torch.randn_like(parameter) * scale + (1.0 if parameter.ndim == 1 else 0.0)
            parameter.copy_(values.to(dtype))
    # The model itself stays in float32: a cast would round its rotary frequencies too.
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    return model


@pytest.mark.parametrize(("model_type", "changes"), variants())
def test_logits(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny(model_type, changes, tmp_path)
    length = 150
    tokens = np.random.default_rng(7).integers(0, 320, size=length).tolist()
    with torch.no_grad():
        reference = model(torch.tensor([tokens])).logits[0].float().numpy()
    runtime = load_runtime(tmp_path)
    for chunks in ([], [1, 63, 2]):
        ours = all_logits(runtime, tokens, chunks, rope_length=length)
        scale = np.abs(reference).max()
        np.testing.assert_allclose(ours, reference, rtol=0, atol=TOLERANCES.get(model_type, TOLERANCE) * scale)


def test_dynamic_scaling_stretches_with_the_length_fixed_at_admission(tmp_path: Path) -> None:
    changes = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40}
    model = save_tiny("llama", changes, tmp_path)
    tokens = np.random.default_rng(3).integers(0, 320, size=100).tolist()
    with torch.no_grad():
        reference = model(torch.tensor([tokens])).logits[0].numpy()
    runtime = load_runtime(tmp_path)
    np.testing.assert_allclose(
        all_logits(runtime, tokens, [30], rope_length=100), reference, rtol=0, atol=TOLERANCE * np.abs(reference).max()
    )
    short = all_logits(runtime, tokens, [30], rope_length=40)
    assert np.abs(short - reference).max() > 0.1


@pytest.mark.parametrize("model_type", model_types())
def test_bfloat16_stays_close(model_type: str, tmp_path: Path) -> None:
    model = save_tiny(model_type, {}, tmp_path, torch.bfloat16)
    tokens = np.random.default_rng(5).integers(0, 320, size=60).tolist()
    with torch.no_grad():
        reference = model(torch.tensor([tokens])).logits[0].numpy()
    exact = all_logits(load_runtime(tmp_path), tokens)
    tolerance = TOLERANCES.get(model_type, TOLERANCE) * np.abs(reference).max()
    np.testing.assert_allclose(exact, reference, rtol=0, atol=tolerance)
    half = all_logits(load_runtime(tmp_path, dtype="bfloat16"), tokens)
    # Eight bits of mantissa through three layers: a few percent of the spread, and not the float32 result itself.
    spread = reference.std()
    assert 0 < np.abs(half - reference).mean() < 0.05 * spread
