"""qwen3_5: the two spellings of its configuration, and the head that predicts one token further."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.errors import CheckpointError
from pocketllm.models.family import family
from pocketllm.runtimes.base import Runtime, RuntimeOptions
from pocketllm.runtimes.registry import BACKENDS
from tests.forward import all_logits, as_numpy, chunk_batch, load_runtime
from tests.models.test_against_transformers import TOLERANCES, save_tiny
from tests.models.wrapping import wrap_checkpoint, wrapped

QWEN = family("qwen3_5")
HEAD = family("qwen3_5_mtp")


def test_both_spellings_say_the_same() -> None:
    raw = QWEN.tiny_config()
    plain = QWEN.parse_config("hf", raw)
    within = QWEN.parse_config("hf", wrapped(raw))
    assert replace(within, prefix=plain.prefix) == plain
    older = {key: value for key, value in raw.items() if key != "rope_parameters"}
    older |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert QWEN.parse_config("hf", older) == plain
    regular = {key: value for key, value in raw.items() if key != "layer_types"} | {"full_attention_interval": 3}
    assert QWEN.parse_config("hf", regular) == plain


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 2**29}, "head_dim"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"another_key": 1}, "another_key"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    raw = QWEN.tiny_config() | changes
    for spelling in (raw, wrapped(raw)):
        with pytest.raises(CheckpointError, match=complaint):
            QWEN.parse_config("hf", spelling)
    with pytest.raises(CheckpointError, match="another_key"):
        QWEN.parse_config("hf", wrapped(QWEN.tiny_config()) | {"another_key": 1})
    for nothing in (None, {}):
        with pytest.raises(CheckpointError, match="text_config"):
            QWEN.parse_config("hf", wrapped(QWEN.tiny_config()) | {"text_config": nothing})


def test_a_head_is_no_model_by_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD.tiny_config() | {"model_type": "qwen3_5_mtp"}))
    save_file({"mtp.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="head of another model"):
        load_runtime(tmp_path)


def test_the_text_part_of_a_multimodal_checkpoint_is_the_model(tmp_path: Path) -> None:
    save_tiny("qwen3_5", {}, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 320, size=40).tolist()
    expected = all_logits(load_runtime(tmp_path), tokens)
    wrap_checkpoint(tmp_path)
    np.testing.assert_array_equal(all_logits(load_runtime(tmp_path), tokens), expected)


class FurtherToken(torch.nn.Module):
    """The head put together from transformers' parts; transformers itself leaves it out."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        config = copy.deepcopy(trunk.config)
        config.layer_types = ["full_attention"]
        self.trunk = trunk
        self.token_norm, self.hidden_norm, self.norm = (
            Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Qwen3_5DecoderLayer(config, 0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.startswith("trunk."):
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits from the trunk's states [T, hidden], and the tokens that follow each [T]."""
        count = len(tokens)
        embedded = self.token_norm(self.trunk.model.embed_tokens(tokens[None]))
        x = self.fc(torch.cat([embedded, self.hidden_norm(hidden[None])], dim=-1))
        places = torch.arange(count)[None]
        rotary = self.trunk.model.rotary_emb(x, places[None].expand(3, 1, -1))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        x = self.layer(x, position_embeddings=rotary, attention_mask=mask)
        x = x[0] if isinstance(x, tuple) else x
        return self.trunk.lm_head(self.norm(x))[0]

    def stored(self) -> dict[str, torch.Tensor]:
        """Its weights as checkpoints name them."""
        names = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "layer": "layers.0"}
        own = ((name.partition("."), tensor) for name, tensor in self.state_dict().items())
        return {
            f"mtp.{names.get(first, first)}.{rest}": tensor.clone()
            for (first, _, rest), tensor in own
            if first != "trunk"
        }


def load_head(path: Path, backend: str) -> Runtime:
    with open_checkpoint(path) as checkpoint:
        config = HEAD.parse_config(checkpoint.naming, checkpoint.config)
        runtime = BACKENDS[backend].load()(config, RuntimeOptions(device="cpu", dtype="float32", block_size=16))
        runtime.load(checkpoint, lambda *_: None)
    runtime.allocate(16, 0)
    return runtime


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_the_head_predicts_what_transformers_parts_predict(backend: str, tmp_path: Path) -> None:
    model = save_tiny("qwen3_5", {}, tmp_path)
    head = FurtherToken(model).eval()
    config = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(tmp_path / "model.safetensors") | head.stored(), tmp_path / "model.safetensors")

    tokens = np.random.default_rng(2).integers(0, 320, size=30).tolist()
    trunk, ours = load_runtime(tmp_path, backend=backend), load_head(tmp_path, backend)
    with torch.no_grad():
        states = model.model(torch.tensor([tokens])).last_hidden_state[0]
        expected = head(states[:-1], torch.tensor(tokens[1:])).numpy()
    blocks, past, rows = list(range(4)), 0, []
    for count in (1, 17, 11):
        chunk = chunk_batch([(tokens[past : past + count], past, blocks)])
        hidden = trunk.forward(replace(chunk, hidden_rows=chunk.output_rows)).hidden
        following = chunk_batch([(tokens[past + 1 : past + count + 1], past, blocks)])
        rows.append(as_numpy(ours.forward(replace(following, hidden=hidden)).logits))
        past += count
    tolerance = TOLERANCES["qwen3_5"] * np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=tolerance)


def test_a_checkpoint_without_the_head_says_so() -> None:
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers"):
        HEAD.parse_config("hf", QWEN.tiny_config())
    assert HEAD.parse_config("hf", HEAD.tiny_config()).kinds == ("full_attention",)
