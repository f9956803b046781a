"""Configurations: both spellings are read, and what is not understood is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pocketllm.errors import CheckpointError
from pocketllm.models.family import family, model_types


def parse(model_type: str, **changes: Any) -> Any:
    module = family(model_type)
    return module.parse_config("hf", module.tiny_config() | changes)


@pytest.mark.parametrize("model_type", model_types())
def test_an_unknown_key_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(CheckpointError, match="'logit_multiplier'"):
        parse(model_type, logit_multiplier=2.0)
    parse(model_type, logit_multiplier=None, another_switch=False, _name_or_path="x", torch_dtype="bfloat16")


@pytest.mark.parametrize("model_type", model_types())
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "48"),
        ("hidden_size", True),
        ("num_hidden_layers", 2**40),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1.0),
        ("hidden_act", "gelu"),
        ("eos_token_id", "2"),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "twist": 1.0}),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_wrong_value_is_refused_naming_the_key(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        parse(model_type, **{key: value})


@pytest.mark.parametrize("model_type", model_types())
def test_heads_must_share_key_heads_evenly(model_type: str) -> None:
    with pytest.raises(CheckpointError, match="cannot share 5 key heads"):
        parse(model_type, num_key_value_heads=5)


def test_old_and_new_rotary_spellings_agree() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = parse("llama", rope_theta=5000.0, rope_scaling={"type": "yarn", **scaling})
    new = parse("llama", rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **scaling})
    assert old.rotary == new.rotary


def test_a_required_size_that_is_missing_has_the_familys_default() -> None:
    module = family("llama")
    raw = module.tiny_config()
    del raw["intermediate_size"]
    assert module.parse_config("hf", raw).intermediate_size == 11008


def test_an_unknown_family_is_refused_listing_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="llama, qwen2, qwen3"):
        family("mamba")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False}, (0, 0, 0)),
        ({"max_window_layers": 2}, (0, 0, 19)),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (19, 0, 19)),
    ],
)
def test_windows_layer_by_layer(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse("qwen2", **changes).windows == windows


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
    ],
)
def test_layer_types_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        parse("qwen2", **changes)
