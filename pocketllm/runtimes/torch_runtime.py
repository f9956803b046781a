"""The reference backend: plain PyTorch operations in float32 or bfloat16, on any torch device.

Weights are expanded when they are loaded. Its products are not the same bits for every batch size, so it declares no
batch invariance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import QuantTensor, dequantize
from pocketllm.kernels.contract import BoundOp
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.models.family import Model, ModelConfig, PagedCache, StateCache, WeightSpec, family
from pocketllm.runtimes.base import (
    Batch,
    IntArray,
    Progress,
    Runtime,
    RuntimeOptions,
    SamplingRows,
    Scores,
    StepOutput,
)
from pocketllm.runtimes.slots import cache_slots
from pocketllm.runtimes.weights import check_weights, read_weights

LayerArrays = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch as the ops take it. The arrays that steer Python loops stay on the host."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    rope_lengths: torch.Tensor
    slots: torch.Tensor
    query_start: IntArray
    context_len: IntArray
    block_table: torch.Tensor
    output_rows: torch.Tensor


class TorchRuntime(Runtime):
    """See `Runtime`."""

    name = "torch"
    batch_invariant = "matrix products of PyTorch round differently for different batch sizes"
    bytes_per_state = 0

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self._family = family(config.model_type)
        self._config = config
        self._options = options
        self._device = torch.device(options.device)
        self._dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
        self._layout = [
            {name: cache for name, cache in layer.items() if isinstance(cache, PagedCache)}
            for layer in self._family.cache_layout(config)
        ]
        self._ops = BackendOpTable("torch", device=options.device, dtype=options.dtype)
        self._take_rows = self._ops.bind("take_rows")
        self._sample = self._ops.bind("sample")
        self._score: dict[int, BoundOp] = {}
        self._model: Model | None = None
        self._caches: list[LayerArrays] = []
        self.vocab_size = config.vocab_size
        self.bytes_per_block = sum(
            prod(self._block_shape(cache)) * self._dtype.itemsize for layer in self._layout for cache in layer.values()
        )
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """See `Runtime.supports`."""
        reasons = []
        caches = [cache for layer in family(config.model_type).cache_layout(config) for cache in layer.values()]
        if any(isinstance(cache, StateCache) for cache in caches):
            reasons.append("recurrent states")
        if any(isinstance(cache, PagedCache) and cache.shares is not None for cache in caches):
            reasons.append("caches shared between layers")
        if any(isinstance(cache, PagedCache) and cache.tokens_per_entry > 1 for cache in caches):
            reasons.append("cache entries of several tokens")
        if options.device.startswith("cuda") and not torch.cuda.is_available():
            reasons.append(f"device {options.device} (PyTorch sees no CUDA device)")
        return tuple(reasons)

    @torch.inference_mode()
    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """See `Runtime.load`."""
        specs = check_weights(checkpoint, self._config)
        weights = {}
        for done, (spec, tensor) in enumerate(read_weights(checkpoint, specs)):
            progress("weights", done, len(specs))
            weights[spec.name] = self._prepare(spec, tensor)
        self._model = self._family.build(self._config, weights, self._ops)
        progress("weights", len(specs), len(specs))

    def _prepare(self, spec: WeightSpec, tensor: QuantTensor) -> torch.Tensor:
        """Expanded; vectors (norms, biases) stay in float32 only where the activations are float32."""
        values = torch.from_numpy(dequantize(tensor)).reshape(spec.shape)
        return values.to(device=self._device, dtype=self._dtype)

    def allocate(self, blocks: int, states: int) -> None:
        """See `Runtime.allocate`."""
        self._caches = [
            {
                name: torch.zeros((blocks, *self._block_shape(cache)), dtype=self._dtype, device=self._device)
                for name, cache in layer.items()
            }
            for layer in self._layout
        ]

    def _block_shape(self, cache: PagedCache) -> tuple[int, ...]:
        return (self._options.block_size, *cache.entry_shape)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> StepOutput:
        """See `Runtime.forward`."""
        if self._model is None:
            raise RuntimeError("forward before load")
        return StepOutput(logits=self._model.forward(self._step(batch), self._caches))

    def _step(self, batch: Batch) -> _Step:
        lengths = np.diff(batch.query_start)
        return _Step(
            token_ids=self._tensor(batch.token_ids),
            positions=self._tensor(batch.positions),
            rope_lengths=self._tensor(np.repeat(batch.rope_length, lengths)),
            slots=self._tensor(cache_slots(batch, self._options.block_size)),
            query_start=batch.query_start,
            context_len=batch.context_len,
            block_table=self._tensor(batch.block_table),
            output_rows=self._tensor(batch.output_rows.astype(np.int64)),
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    @torch.inference_mode()
    def take_rows(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """See `Runtime.take_rows`."""
        taken: torch.Tensor = self._take_rows(logits, self._tensor(rows.astype(np.int64)))
        return taken

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> IntArray:
        """See `Runtime.sample`."""
        ids: torch.Tensor = self._sample(logits, **rows.arrays())
        return ids.to(torch.int32).cpu().numpy()

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, targets: IntArray, k: int) -> Scores:
        """See `Runtime.score`."""
        if k not in self._score:
            self._score[k] = self._ops.bind("score", k=k)
        results = self._score[k](logits, self._tensor(targets))
        return Scores(*(result.cpu().numpy() for result in results))

    def commit(self, accepted: IntArray) -> None:
        """See `Runtime.commit`. Paged entries need nothing: what was not accepted is overwritten."""

    @torch.inference_mode()
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_blocks`."""
        for array in self._arrays():
            array[list(target)] = array[list(source)]

    def snapshot(self, slot: int) -> tuple[torch.Tensor, ...]:
        """See `Runtime.snapshot`. The models of this runtime have no recurrent states, so there is nothing in it."""
        return ()

    def restore(self, slot: int, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See `Runtime.restore`."""

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """See `Runtime.export_blocks`: layer by layer, array by array, the blocks in the order given."""
        return b"".join(
            array[list(blocks)].contiguous().cpu().view(torch.uint8).numpy().tobytes() for array in self._arrays()
        )

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_blocks`."""
        wanted = self.bytes_per_block * len(blocks)
        if len(data) != wanted:
            raise ValueError(f"{len(blocks)} blocks hold {wanted} bytes; {len(data)} were given")
        start = 0
        for array in self._arrays():
            shape = (len(blocks), *array.shape[1:])
            size = prod(shape) * array.dtype.itemsize
            if size:
                values = torch.frombuffer(bytearray(data[start : start + size]), dtype=array.dtype)
                array[list(blocks)] = values.reshape(shape).to(self._device)
            start += size

    def _arrays(self) -> Iterator[torch.Tensor]:
        for layer in self._caches:
            yield from layer.values()

    def close(self) -> None:
        """See `Runtime.close`."""
        self._model = None
        self._caches = []
