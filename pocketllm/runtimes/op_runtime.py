"""The common part of the runtimes that build a family's model from the ops of one backend.

What differs is named by three things: the array library, the op table and `prepare`, which says how a weight is held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Array, Arrays, OpTable
from pocketllm.models.family import Model, ModelConfig, PagedCache, StateCache, WeightSpec, family
from pocketllm.runtimes.arrays import ArrayLibrary
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
from pocketllm.types import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A batch as the ops take it; see `pocketllm.models.family.Step`."""

    token_ids: Array
    positions: Array
    rope_lengths: Array
    slots: Array
    query_start: Array
    context_len: Array
    block_table: Array
    output_rows: Array


class OpRuntime(Runtime):
    """A runtime over an array library and an op table."""

    bytes_per_state = 0

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self._family = family(config.model_type)
        self._config = config
        self._block_size = options.block_size
        self._arrays = self.make_arrays(options)
        self._ops = self.make_ops(options)
        self._take_rows = self._ops.bind("take_rows")
        self._sample = self._ops.bind("sample")
        # Bound once, for the most that a request may ask for: binding may compile, which no request must wait for.
        self._most_scored = min(MAX_LOGPROBS, config.vocab_size)
        self._score = self._ops.bind("score", k=self._most_scored)
        self._model: Model | None = None
        self._caches: list[dict[str, Array]] = []
        self._layout = [
            {name: cache for name, cache in layer.items() if isinstance(cache, PagedCache)}
            for layer in self._family.cache_layout(config)
        ]
        self.vocab_size = config.vocab_size
        values = sum(prod(self._block_shape(cache)) for layer in self._layout for cache in layer.values())
        self.bytes_per_block = values * self._arrays.itemsize

    @classmethod
    def unsupported_caches(cls, config: ModelConfig) -> tuple[str, ...]:
        """What the model's caches need that this class does not have."""
        caches = [cache for layer in family(config.model_type).cache_layout(config) for cache in layer.values()]
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        reasons = {
            "recurrent states": any(isinstance(cache, StateCache) for cache in caches),
            "caches shared between layers": any(cache.shares is not None for cache in paged),
            "cache entries of several tokens": any(cache.tokens_per_entry > 1 for cache in paged),
        }
        return tuple(reason for reason, needed in reasons.items() if needed)

    @abstractmethod
    def make_arrays(self, options: RuntimeOptions) -> ArrayLibrary:
        """The arrays it computes on."""

    @abstractmethod
    def make_ops(self, options: RuntimeOptions) -> OpTable:
        """The ops it builds models from."""

    @abstractmethod
    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> Any:
        """A weight as the ops hold it."""

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """See `Runtime.load`."""
        specs = check_weights(checkpoint, self._config)
        weights: dict[str, Any] = {}
        for done, (spec, tensor) in enumerate(read_weights(checkpoint, specs)):
            progress("weights", done, len(specs))
            weights[spec.name] = self.prepare(spec, tensor)
        self.build(weights)
        progress("weights", len(specs), len(specs))

    def build(self, weights: Arrays) -> None:
        """Bind the model's ops to prepared weights."""
        self._model = self._family.build(self._config, weights, self._ops)

    def allocate(self, blocks: int, states: int) -> None:
        """See `Runtime.allocate`."""
        self._caches = [
            {name: self._arrays.zeros((blocks, *self._block_shape(cache))) for name, cache in layer.items()}
            for layer in self._layout
        ]

    def _block_shape(self, cache: PagedCache) -> tuple[int, ...]:
        return (self._block_size, *cache.entry_shape)

    def forward(self, batch: Batch) -> StepOutput:
        """See `Runtime.forward`."""
        if self._model is None:
            raise RuntimeError("forward before load")
        return StepOutput(logits=self._model.forward(self.device_step(batch), self._caches))

    def device_step(self, batch: Batch) -> DeviceStep:
        """The batch where the ops compute."""
        move = self._arrays.from_host
        return DeviceStep(
            token_ids=move(batch.token_ids),
            positions=move(batch.positions),
            rope_lengths=move(np.repeat(batch.rope_length, np.diff(batch.query_start))),
            slots=move(cache_slots(batch, self._block_size)),
            query_start=move(batch.query_start),
            context_len=move(batch.context_len),
            block_table=move(batch.block_table),
            output_rows=move(batch.output_rows.astype(np.int64)),
        )

    def take_rows(self, logits: Array, rows: IntArray) -> Array:
        """See `Runtime.take_rows`."""
        return self._take_rows(logits, self._arrays.from_host(rows.astype(np.int64)))

    def sample(self, logits: Array, rows: SamplingRows) -> IntArray:
        """See `Runtime.sample`."""
        return self._arrays.to_host(self._sample(logits, **rows.arrays())).astype(np.int32, copy=False)

    def score(self, logits: Array, targets: IntArray, k: int) -> Scores:
        """See `Runtime.score`."""
        results = self._score(logits, self._arrays.from_host(targets))
        logsumexp, target_logit, top_ids, top_logits = (self._arrays.to_host(result) for result in results)
        return Scores(logsumexp, target_logit, top_ids[:, :k], top_logits[:, :k])

    def commit(self, accepted: IntArray) -> None:
        """See `Runtime.commit`. Paged entries need nothing: what was not accepted is overwritten."""

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_blocks`."""
        for array in self._cache_arrays():
            self._arrays.copy_blocks(array, source, target)

    def snapshot(self, slot: int) -> tuple[Array, ...]:
        """See `Runtime.snapshot`. The models of this class have no recurrent states, so there is nothing in it."""
        return ()

    def restore(self, slot: int, snapshot: tuple[Array, ...]) -> None:
        """See `Runtime.restore`."""

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """See `Runtime.export_blocks`: layer by layer, array by array, the blocks in the order given."""
        return b"".join(self._arrays.read_blocks(array, blocks) for array in self._cache_arrays())

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_blocks`."""
        wanted = self.bytes_per_block * len(blocks)
        if len(data) != wanted:
            raise ValueError(f"{len(blocks)} blocks hold {wanted} bytes; {len(data)} were given")
        start = 0
        for array in self._cache_arrays():
            size = len(blocks) * prod(array.shape[1:]) * self._arrays.itemsize
            self._arrays.write_blocks(array, blocks, data[start : start + size])
            start += size

    def _cache_arrays(self) -> Iterator[Array]:
        for layer in self._caches:
            yield from layer.values()

    def close(self) -> None:
        """See `Runtime.close`."""
        self._model = None
        self._caches = []
