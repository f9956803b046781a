"""qwen3_5_mtp: the head of a qwen3_5 checkpoint that predicts one token further.

From the trunk's hidden state at position t (behind its last norm, as the trunk's own head reads it) and the token at
t + 1 it gives logits for t + 2. It is one attention layer with a cache of its own, an embedding and a head that it
shares with the trunk. Source: the ``mtp.*`` tensors of Qwen's checkpoints; Gloeckle et al., "Better & Faster Large
Language Models via Multi-token Prediction", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pocketllm.errors import CheckpointError
from pocketllm.kernels.contract import Arrays, OpTable
from pocketllm.models import qwen3_5
from pocketllm.models.attention_layer import run_attention
from pocketllm.models.family import ColumnSlice, LayerCaches, ModelOutput, Naming, Step, WeightSpec
from pocketllm.models.output_head import OutputHead
from pocketllm.models.qwen3_5 import FULL, Qwen35Config, bind_layer, layer_weights
from pocketllm.models.rotary import bind_angles


def parse_config(naming: Naming, raw: Mapping[str, Any]) -> Qwen35Config:
    """See `Family.parse_config`; it takes the trunk's configuration.

    Raises:
        CheckpointError: the checkpoint has no such head, or one of several layers.
    """
    if raw.get("model_type") == "qwen3_5_mtp":
        raise CheckpointError(
            "configuration key 'model_type' is 'qwen3_5_mtp', the head of another model, which answers nothing by "
            "itself: name that model's own type, qwen3_5"
        )
    trunk = qwen3_5.parse_config(naming, raw)
    layers = (raw.get("text_config") or raw).get("mtp_num_hidden_layers") or 0
    if layers != 1:
        raise CheckpointError(
            f"configuration key 'mtp_num_hidden_layers' is {layers!r}: a head that predicts further tokens has 1 layer"
        )
    return replace(trunk, model_type="qwen3_5_mtp", kinds=(FULL,))


def weights(config: Qwen35Config, naming: Naming) -> tuple[WeightSpec, ...]:
    """See `Family.weights`. The product that joins token and hidden state is stored as one, side by side."""
    hidden = config.hidden_size
    square = (hidden, hidden)
    table = (config.vocab_size, hidden)
    return (
        WeightSpec("embedding", table, f"{config.prefix}embed_tokens.weight"),
        WeightSpec("head", table, "lm_head.weight", optional=config.tied_embeddings),
        WeightSpec("token_norm", (hidden,), "mtp.pre_fc_norm_embedding.weight"),
        WeightSpec("hidden_norm", (hidden,), "mtp.pre_fc_norm_hidden.weight"),
        WeightSpec("from_token", square, "mtp.fc.weight", part=ColumnSlice(2 * hidden, 0, hidden)),
        WeightSpec("from_hidden", square, "mtp.fc.weight", part=ColumnSlice(2 * hidden, hidden, 2 * hidden)),
        WeightSpec("norm", (hidden,), "mtp.norm.weight"),
        *layer_weights(config, FULL, "0", "mtp.layers.0."),
    )


def unread_tensors(config: Qwen35Config) -> tuple[str, ...]:
    """See `Family.unread_tensors`: the trunk's."""
    return ("model.",)


def cache_layout(config: Qwen35Config) -> tuple[LayerCaches, ...]:
    """Keys and values of the one layer."""
    return qwen3_5.cache_layout(config)


class FurtherToken:
    """The built head."""

    def __init__(self, config: Qwen35Config, weights: Arrays, ops: OpTable) -> None:
        self._embedding = ops.bind("embedding", {"table": weights["embedding"]})
        self._token_norm, self._hidden_norm = (
            ops.bind("rms_norm", {"weight": weights[name]}, eps=config.norm_eps, weight_offset=1.0)
            for name in ("token_norm", "hidden_norm")
        )
        self._from_token, self._from_hidden = (
            ops.bind("linear", {"weight": weights[name]}) for name in ("from_token", "from_hidden")
        )
        self._add = ops.bind("add")
        self._angles = bind_angles(config.rotary, ops)
        self._layer = bind_layer(config, FULL, "0", weights, ops)
        head = weights.get("head", weights["embedding"])
        self._head = OutputHead(ops, weights["norm"], head, eps=config.norm_eps, norm_offset=1.0)

    def forward(self, step: Step, caches: Sequence[Arrays]) -> ModelOutput:
        """See `Model.forward`; the row at position t has the token of t + 1 and the trunk's state of t (`step.hidden`).

        So the last entry of a full block depends on the first token of the next one.
        """
        x = self._from_token(self._token_norm(self._embedding(step.token_ids)))
        self._add(x, self._from_hidden(self._hidden_norm(step.hidden)))
        run_attention(self._layer, x, self._angles(step.positions, step.rope_lengths), step, caches[0])
        return self._head(x, step)


def build(config: Qwen35Config, weights: Arrays, ops: OpTable) -> FurtherToken:
    """See `Family.build`."""
    return FurtherToken(config, weights, ops)


def tiny_config() -> dict[str, Any]:
    """See `Family.tiny_config`."""
    return qwen3_5.tiny_config() | {"mtp_num_hidden_layers": 1}
