"""From a checkpoint's tensors to a family's weights: every name, shape and leftover is checked here, once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import FORMATS, QuantTensor
from pocketllm.errors import CheckpointError
from pocketllm.models.family import ColumnSlice, ModelConfig, RowSlice, WeightSpec, family

# Buffers that older exporters wrote beside the weights; the configuration says the same.
_REDUNDANT_ENDINGS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


def check_weights(checkpoint: Checkpoint, config: ModelConfig) -> tuple[WeightSpec, ...]:
    """The weights of the model that the checkpoint has, checked against the configuration.

    Reads headers only.

    Raises:
        CheckpointError: a weight is missing, has another shape than the configuration says, or a tensor of the
            checkpoint is used by nothing.
    """
    specs = family(config.model_type).weights(config, checkpoint.naming)
    present = []
    for spec in specs:
        info = checkpoint.tensors.get(spec.stored_as)
        if info is None:
            if not spec.optional:
                checkpoint.tensor(spec.stored_as)  # raises: there is no such tensor
            continue
        if info.shape != spec.stored_shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {spec.stored_as!r} has shape {list(info.shape)}; "
                f"by the configuration it is {list(spec.stored_shape)}"
            )
        present.append(spec)
    used = {spec.stored_as for spec in specs}
    unread = family(config.model_type).unread_tensors(config)
    for name in checkpoint.tensors:
        if name not in used and not name.endswith(_REDUNDANT_ENDINGS) and not name.startswith(unread):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} is used by no layer of family {config.model_type!r} "
                "with this configuration; running the model without it would give wrong answers"
            )
    return tuple(present)


def read_weights(checkpoint: Checkpoint, specs: tuple[WeightSpec, ...]) -> Iterator[tuple[WeightSpec, QuantTensor]]:
    """The tensors of `specs`, one after another, with their rows in the order that the ops expect."""
    for spec in specs:
        tensor = checkpoint.tensor(spec.stored_as)
        tensor = _part_of(tensor, spec)
        yield spec, _unpair(tensor, spec.unpair_heads) if spec.unpair_heads else tensor


def _part_of(tensor: QuantTensor, spec: WeightSpec) -> QuantTensor:
    """Some rows, with their blocks as they are, or some columns, as long as they are whole blocks."""
    part = spec.part
    data: npt.NDArray[np.uint8]
    if isinstance(part, RowSlice):
        data = tensor.data.reshape(part.groups, part.group_rows, -1)[:, part.start : part.stop]
    elif isinstance(part, ColumnSlice):
        row_bytes = FORMATS[tensor.format].row_bytes
        data = tensor.data[:, row_bytes(part.start) : row_bytes(part.stop)]
    else:
        return tensor
    return replace(tensor, data=np.ascontiguousarray(data).reshape(spec.shape[0], -1), shape=spec.shape)


def _unpair(tensor: QuantTensor, heads: int) -> QuantTensor:
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) to (0, 1, ..., d - 1). A row's blocks stay as they are."""
    rows = tensor.shape[0]
    data: npt.NDArray[np.uint8] = tensor.data.reshape(rows, -1)
    halves = data.reshape(heads, rows // heads // 2, 2, data.shape[1]).swapaxes(1, 2)
    return replace(tensor, data=np.ascontiguousarray(halves).reshape(tensor.data.shape))
