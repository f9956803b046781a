"""The common part of the runtimes that build a family's model from the ops of one backend.

What differs is named by three things: the array library, the op table and `prepare`, which says how a weight is held.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Array, Arrays
from pocketllm.kernels.jit.sources import digest
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.models.family import Model, ModelConfig, ModelOutput, PagedCache, WeightSpec, family
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
from pocketllm.runtimes.cache_arrays import CacheArrays
from pocketllm.runtimes.slots import cache_slots
from pocketllm.runtimes.weights import check_weights, read_weights
from pocketllm.types import MAX_LOGPROBS


def _sources() -> list[Path]:
    """What bits depend on beside kernels: how models are built, how weights are read and held, how a step is run.

    All of it, whatever the model, so that nothing is missed that a family or a runtime imports.
    """
    package = Path(__file__).parent.parent
    patterns = ("models/*.py", "runtimes/*.py", "checkpoint/quant.py")
    return [path for pattern in patterns for path in sorted(package.glob(pattern))]


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
    state_slots: Array
    save_slots: Array
    output_rows: Array
    hidden_rows: Array | None
    hidden: Array | None


_Self = TypeVar("_Self", bound="OpRuntime")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def on_device(method: Callable[Concatenate[_Self, _Given], _Result]) -> Callable[Concatenate[_Self, _Given], _Result]:
    """The method, run within `OpRuntime.device_context`: for each that the engine calls and that touches arrays."""

    @wraps(method)
    def run(self: _Self, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
        with self.device_context():
            return method(self, *given, **named)

    return run


class OpRuntime(Runtime):
    """A runtime over an array library and an op table."""

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self._family = family(config.model_type)
        self._config = config
        self._options = options
        if options.overrides and self.batch_invariant is None:
            names = ", ".join(sorted(options.overrides))
            self.batch_invariant = f"nothing is known of the bits of the caller's own kernels ({names})"
        self._arrays = self.make_arrays(options)
        self._ops = self.make_ops(options)
        self._take_rows = self._ops.bind("take_rows")
        self._sample = self._ops.bind("sample")
        # Bound once, for the most that a request may ask for: binding may compile, which no request must wait for.
        self._most_scored = min(MAX_LOGPROBS, config.vocab_size)
        self._score = self._ops.bind("score", k=self._most_scored)
        self._model: Model | None = None
        self._caches = CacheArrays(self._family.cache_layout(config), options.block_size, self._arrays)
        self.vocab_size = config.vocab_size
        self.bytes_per_block = self._caches.nbytes["block"]
        self.bytes_per_state = self._caches.nbytes["state"]

    @classmethod
    def unsupported_caches(cls, config: ModelConfig) -> tuple[str, ...]:
        """What the model's caches need that this class does not have."""
        caches = [cache for layer in family(config.model_type).cache_layout(config) for cache in layer.values()]
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        reasons = {
            "caches shared between layers": any(cache.shares is not None for cache in paged),
            "cache entries of several tokens": any(cache.tokens_per_entry > 1 for cache in paged),
        }
        return tuple(reason for reason, needed in reasons.items() if needed)

    @abstractmethod
    def make_arrays(self, options: RuntimeOptions) -> ArrayLibrary:
        """The arrays it computes on."""

    @abstractmethod
    def make_ops(self, options: RuntimeOptions) -> BackendOpTable:
        """The ops it builds models from."""

    def device_context(self) -> contextlib.AbstractContextManager[Any]:
        """What arrays are touched within, such as a device and its stream; not entered twice."""
        return contextlib.nullcontext()

    @abstractmethod
    def compiled_for(self) -> tuple[str, ...]:
        """What else the bits may depend on: the processor or device by name, and the versions of what compiles."""

    @abstractmethod
    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> Any:
        """A weight as the ops hold it."""

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """See `Runtime.load`."""
        specs = check_weights(checkpoint, self._config)
        weights: dict[str, Any] = {}
        for done, (spec, tensor) in enumerate(read_weights(checkpoint, specs)):
            progress("weights", done, len(specs))
            with self.device_context():  # anew for each: another model's steps may have to wait for its end
                weights[spec.name] = self.prepare(spec, tensor)
        with self.device_context():
            self.build(weights)
        progress("weights", len(specs), len(specs))

    def build(self, weights: Arrays) -> None:
        """Bind the model's ops to prepared weights."""
        self._model = self._family.build(self._config, weights, self._ops)
        self._ops.check_overrides_bound()

    @property
    def numerics_id(self) -> str:
        """See `Runtime.numerics_id`."""
        options = self._options
        facts = (self.name, options.device, options.dtype, f"blocks of {options.block_size}", repr(self._config))
        return digest(_sources(), *facts, self._ops.numerics(), *self.compiled_for())

    @on_device
    def allocate(self, blocks: int, states: int) -> None:
        """See `Runtime.allocate`."""
        self._caches.allocate(blocks, states)

    @on_device
    def forward(self, batch: Batch) -> StepOutput:
        """See `Runtime.forward`."""
        return self.step(batch)

    def step(self, batch: Batch) -> StepOutput:
        """A step, to be called within `device_context`."""
        output = self.run(self.device_step(batch))
        return StepOutput(output.logits, output.hidden)

    def run(self, step: DeviceStep) -> ModelOutput:
        """The model's own step."""
        if self._model is None:
            raise RuntimeError("forward before load")
        return self._model.forward(step, self._caches.layers)

    def device_step(self, batch: Batch) -> DeviceStep:
        """The batch where the ops compute."""
        move = self._arrays.from_host
        return DeviceStep(
            token_ids=move(batch.token_ids),
            positions=move(batch.positions),
            rope_lengths=move(np.repeat(batch.rope_length, np.diff(batch.query_start))),
            slots=move(cache_slots(batch, self._options.block_size)),
            query_start=move(batch.query_start),
            context_len=move(batch.context_len),
            block_table=move(batch.block_table),
            state_slots=move(batch.state_slot),
            save_slots=move(batch.save_slot),
            output_rows=move(batch.output_rows.astype(np.int64)),
            hidden_rows=None if batch.hidden_rows is None else move(batch.hidden_rows.astype(np.int64)),
            hidden=batch.hidden,
        )

    @on_device
    def take_rows(self, logits: Array, rows: IntArray) -> Array:
        """See `Runtime.take_rows`."""
        return self._take_rows(logits, self._arrays.from_host(rows.astype(np.int64)))

    @on_device
    def sample(self, logits: Array, rows: SamplingRows) -> IntArray:
        """See `Runtime.sample`."""
        return self._arrays.to_host(self._sample(logits, **rows.arrays())).astype(np.int32, copy=False)

    @on_device
    def score(self, logits: Array, targets: IntArray, k: int) -> Scores:
        """See `Runtime.score`."""
        results = self._score(logits, self._arrays.from_host(targets))
        logsumexp, target_logit, top_ids, top_logits = (self._arrays.to_host(result) for result in results)
        return Scores(logsumexp, target_logit, top_ids[:, :k], top_logits[:, :k])

    @on_device
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_blocks`."""
        self._caches.copy("block", source, target)

    @on_device
    def copy_states(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `Runtime.copy_states`."""
        self._caches.copy("state", source, target)

    @on_device
    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """See `Runtime.export_blocks`."""
        return self._caches.read("block", blocks)

    @on_device
    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_blocks`."""
        self._caches.write("block", blocks, data)

    @on_device
    def export_states(self, slots: Sequence[int]) -> bytes:
        """See `Runtime.export_states`."""
        return self._caches.read("state", slots)

    @on_device
    def import_states(self, slots: Sequence[int], data: bytes) -> None:
        """See `Runtime.import_states`."""
        self._caches.write("state", slots, data)

    @on_device
    def close(self) -> None:
        """See `Runtime.close`."""
        self._model = None
        self._caches.drop()
