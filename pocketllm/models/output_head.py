"""The end of every decoder: a norm, and a product with the vocabulary's weight."""

from __future__ import annotations

from pocketllm.kernels.contract import Array, OpTable
from pocketllm.models.family import ModelOutput, Step


class OutputHead:
    """Logits of the rows that want them, and hidden states of those that another model reads.

    Args:
        ops: what the runtime computes with.
        norm, weight: weights of the norm [hidden] and of the product [vocab, hidden].
        eps, norm_offset: of the norm.
    """

    def __init__(self, ops: OpTable, norm: Array, weight: Array, *, eps: float, norm_offset: float = 0.0) -> None:
        self._logits = ops.bind("lm_head", {"norm": norm, "weight": weight}, eps=eps, norm_offset=norm_offset)
        self._take_rows = ops.bind("take_rows")
        self._norm = ops.bind("rms_norm", {"weight": norm}, eps=eps, weight_offset=norm_offset)

    def __call__(self, x: Array, step: Step) -> ModelOutput:
        """What comes of the last layer's rows."""
        hidden = None if step.hidden_rows is None else self._norm(self._take_rows(x, step.hidden_rows))
        return ModelOutput(self._logits(x, step.output_rows), hidden)
