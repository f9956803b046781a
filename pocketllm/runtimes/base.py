"""What the engine asks of a backend: load a model, run flat batches, keep caches, score and sample.

Arrays, cache layout, fusion and memory are the runtime's own. What crosses this boundary is NumPy on the way in, and
token ids, scores and opaque logits on the way out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.kernels.contract import Implementation
from pocketllm.models.family import ModelConfig

IntArray = npt.NDArray[np.int32]
Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` while a model is loaded."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: prefill chunks, decode rows and draft rows in one flat batch.

    T tokens of S sequences, R of which want logits; B is the longest block table. Every array is int32.

    Recurrent states lie in slots, of which a sequence may use several: each row can save the states after it. So
    running on, a snapshot at a block's end in the middle of a chunk, and draft rows of which some are rejected are the
    same thing, and nothing is copied for them. The slots that a step writes are distinct; one that a sequence reads is
    written by that sequence alone. Models without recurrent states ignore both arrays.

    Attributes:
        token_ids: [T].
        positions: [T], absolute positions in their sequences.
        query_start: [S + 1]; the tokens of sequence s are ``query_start[s]`` up to ``query_start[s + 1]``.
        context_len: [S], tokens of the sequence in the cache once this step's own are written.
        block_table: [S, B], the sequence's blocks in order; entries beyond what context_len needs are -1.
        state_slot: [S], the slot whose states the sequence's first row goes on from; -1 where the sequence begins.
        save_slot: [T], the slot into which the states after the row are put; -1 puts them nowhere.
        rope_length: [S], the length that length-dependent rotary scalings are fixed at when a sequence is admitted.
        output_rows: [R], rows of the flat batch whose logits are wanted.
        hidden_rows: [H], rows whose hidden states are wanted; None when no one reads them.
        hidden: [T, hidden], opaque: for a head that goes on from another model's hidden states, what a runtime of its
            kind gave. The row at position t holds that model's state of position t, and in `token_ids` the token of
            position t + 1. None for every other model.
    """

    token_ids: IntArray
    positions: IntArray
    query_start: IntArray
    context_len: IntArray
    block_table: IntArray
    state_slot: IntArray
    save_slot: IntArray
    rope_length: IntArray
    output_rows: IntArray
    hidden_rows: IntArray | None = None
    hidden: Any = None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to draw one token for each of R logits rows; the op ``sample`` defines what each field does.

    Attributes:
        seed: uint64 [R].
        position: int32 [R], the absolute position of the token that is drawn.
        temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty: float32 [R].
        top_k: int32 [R].
        adjust_start: int32 [R + 1]; row r's adjustments are ``adjust_start[r]`` up to ``adjust_start[r + 1]``.
        adjust_ids: int32 [A], token ids.
        adjust_bias: float32 [A], added to the logit.
        adjust_count: int32 [A], how often the reply has the token.
        adjust_seen: bool [A], whether prompt or reply has it.
        allowed: uint32 [R, ceil(vocab / 32)], bit i % 32 of word i // 32 says whether token i may be drawn; or None.
    """

    seed: npt.NDArray[np.uint64]
    position: IntArray
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: IntArray
    frequency_penalty: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    adjust_start: IntArray
    adjust_ids: IntArray
    adjust_bias: npt.NDArray[np.float32]
    adjust_count: IntArray
    adjust_seen: npt.NDArray[np.bool_]
    allowed: npt.NDArray[np.uint32] | None = None

    def arrays(self) -> dict[str, Any]:
        """The fields by name, as the op takes them; what is None is left out."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves behind.

    Attributes:
        logits: [R, vocab], opaque: for `Runtime.sample` and `Runtime.score` of the runtime that made it.
        hidden: [H, hidden], opaque: what the output head's product reads of ``batch.hidden_rows``; None without them.
    """

    logits: Any
    hidden: Any = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw log-probability material of R rows, before bias, temperature and cuts.

    Attributes:
        logsumexp: float32 [R].
        target_logit: float32 [R].
        top_ids: int32 [R, k], likeliest first.
        top_logits: float32 [R, k].
    """

    logsumexp: npt.NDArray[np.float32]
    target_logit: npt.NDArray[np.float32]
    top_ids: IntArray
    top_logits: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """What a runtime is made with; ``auto`` is resolved before it gets here.

    Attributes:
        device: such as ``cpu`` or ``cuda:0``.
        dtype: ``float32`` or ``bfloat16``.
        block_size: tokens of one KV block.
        threads: CPU threads, or None for the backend's default.
        overrides: implementations by op that replace the backend's own.
    """

    device: str
    dtype: str
    block_size: int
    threads: int | None = None
    overrides: Mapping[str, Implementation] = field(default_factory=dict)


class Runtime(ABC):
    """A loaded model on one backend. One thread, the engine's, calls it.

    Life: ``supports`` (before anything is read) -> the constructor -> ``load`` -> ``allocate`` -> ``forward`` and the
    rest -> ``close``.

    Attributes:
        name: the backend.
        vocab_size: columns of the logits.
        batch_invariant: None when a sequence's logits are the same bits whatever runs beside it and however it is
            chunked, else the reason why not.
        bytes_per_block: memory of one KV block over all layers.
        bytes_per_state: memory of one slot of recurrent states over all layers; 0 where the model has none.
    """

    name: str
    vocab_size: int
    batch_invariant: str | None
    bytes_per_block: int
    bytes_per_state: int

    @classmethod
    @abstractmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """Reasons why this backend cannot run such a model; () when it can. Reads no weight, touches no device."""

    @abstractmethod
    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        """Sizes become known; nothing is read yet."""

    @abstractmethod
    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Prepare the weights, compile what has to be compiled and bind the model."""

    def device_memory(self) -> tuple[int, int] | None:
        """Total and free bytes where the caches will lie; None when that is host memory."""
        return None

    @property
    @abstractmethod
    def numerics_id(self) -> str:
        """Equal for loaded runtimes whose logits, cache entries and states are interchangeable, bit for bit.

        It covers backend, device, instruction set, dtypes, the kernels' sources and the configuration; not the weights.
        """

    @abstractmethod
    def allocate(self, blocks: int, states: int) -> None:
        """Make room for so many KV blocks and slots of recurrent states; what was there before is dropped."""

    @abstractmethod
    def forward(self, batch: Batch) -> StepOutput:
        """Run one step: write this step's cache entries and give the logits of ``batch.output_rows``."""

    @abstractmethod
    def take_rows(self, logits: Any, rows: IntArray) -> Any:
        """Some rows of the logits, in the order of `rows`, as logits."""

    @abstractmethod
    def sample(self, logits: Any, rows: SamplingRows) -> IntArray:
        """One token id for each row of logits, int32 [R]; -1 where the row has NaN or nothing is allowed."""

    @abstractmethod
    def score(self, logits: Any, targets: IntArray, k: int) -> Scores:
        """Log-sum-exp, the targets' logits and the k likeliest tokens of each row."""

    @abstractmethod
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole KV blocks within the cache."""

    @abstractmethod
    def copy_states(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the recurrent states of some slots to others."""

    @abstractmethod
    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """The contents of KV blocks, one after another, for host memory or a file.

        ``export_blocks([a, b]) == export_blocks([a]) + export_blocks([b])``. Only the same model on the same runtime
        reads it.
        """

    @abstractmethod
    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """Put exported contents into blocks; ValueError when the size does not fit."""

    @abstractmethod
    def export_states(self, slots: Sequence[int]) -> bytes:
        """The recurrent states in some slots, likewise; b"" where the model has none."""

    @abstractmethod
    def import_states(self, slots: Sequence[int], data: bytes) -> None:
        """Put exported states into slots; ValueError when the size does not fit."""

    @abstractmethod
    def close(self) -> None:
        """Give every resource back; the runtime cannot be used afterwards."""
