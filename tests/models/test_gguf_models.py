"""Models in GGUF files: the same logits as transformers' model that the file was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.errors import CheckpointError
from tests.forward import all_logits, load_runtime
from tests.models.test_against_transformers import TOLERANCE, save_tiny

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def paired(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from halves to neighbouring pairs, as llama's converter writes them."""
    size = rows.shape[0] // heads
    order = np.arange(rows.shape[0]).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)
    return rows[order]


def write_gguf(
    model: Any,
    path: Path,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **keys: Any,
) -> None:
    """The model as a GGUF, its matrices in some format; `keys` are further metadata under the architecture."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    for key, value in keys.items():
        name = f"{arch}.{key.replace('__', '.')}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_key_value(
            name, value, gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch == "llama" and "q_proj" in name:
            values = paired(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = paired(values, config.num_key_value_heads)
        if values.ndim == 2 and matrices != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TOKENS = np.random.default_rng(11).integers(0, 320, size=70).tolist()


def logits_of(model: Any) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
    ],
)
def test_logits(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny(model_type, changes, tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf")
    reference = logits_of(model)
    ours = all_logits(load_runtime(tmp_path / "model.gguf"), TOKENS, [5])
    np.testing.assert_allclose(ours, reference, rtol=0, atol=TOLERANCE * np.abs(reference).max())


def test_a_head_of_its_own_is_used_where_the_file_has_one(tmp_path: Path) -> None:
    model = save_tiny("llama", {"tie_word_embeddings": True}, tmp_path / "hf")
    head = np.random.default_rng(1).standard_normal((320, 48)).astype(np.float32)
    write_gguf(model, tmp_path / "model.gguf", {"output.weight": head})
    tied = all_logits(load_runtime(tmp_path / "hf"), TOKENS)
    own = all_logits(load_runtime(tmp_path / "model.gguf"), TOKENS)
    embedding = model.state_dict()["model.embed_tokens.weight"].numpy()
    # Both heads see the same hidden states, which the tied logits determine.
    hidden = np.linalg.lstsq(embedding.astype(np.float64), tied.T.astype(np.float64), rcond=None)[0].T
    np.testing.assert_allclose(own, hidden @ head.T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("divisor", [1.0, 8.0])
def test_frequency_divisors_of_the_file_are_applied(divisor: float, tmp_path: Path) -> None:
    scaling = {} if divisor == 1.0 else {"rope_scaling": {"rope_type": "linear", "factor": divisor}}
    model = save_tiny("llama", scaling, tmp_path / "hf")
    divisors = np.full(8, divisor, dtype=np.float32)
    write_gguf(model, tmp_path / "model.gguf", {"rope_freqs.weight": divisors})
    reference = logits_of(model)
    ours = all_logits(load_runtime(tmp_path / "model.gguf"), TOKENS)
    np.testing.assert_allclose(ours, reference, rtol=0, atol=TOLERANCE * np.abs(reference).max())


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
            },
        ),
    ],
)
def test_rotary_scaling_of_the_metadata(scaling: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny("llama", {"rope_scaling": scaling}, tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf", **keys)
    reference = logits_of(model)
    ours = all_logits(load_runtime(tmp_path / "model.gguf"), TOKENS)
    np.testing.assert_allclose(ours, reference, rtol=0, atol=TOLERANCE * np.abs(reference).max())


def test_a_window_of_the_metadata_is_kept(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    model = save_tiny("qwen2", changes, tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf", attention__sliding_window=16)
    reference = logits_of(model)
    ours = all_logits(load_runtime(tmp_path / "model.gguf"), TOKENS)
    np.testing.assert_allclose(ours, reference, rtol=0, atol=TOLERANCE * np.abs(reference).max())


def test_metadata_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny("llama", {}, tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf", expert_count=8)
    with pytest.raises(CheckpointError, match=r"llama\.expert_count"):
        load_runtime(tmp_path / "model.gguf")


def test_a_tensor_that_nothing_uses_is_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny("llama", {}, tmp_path / "hf")
    write_gguf(model, tmp_path / "model.gguf", {"blk.0.attn_q.scale": np.ones(4, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.scale"):
        load_runtime(tmp_path / "model.gguf")
