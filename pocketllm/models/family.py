"""What a model family tells the rest: its configuration, its weights' names, its caches and its layers.

A family is one module of this package, named after its ``model_type``. It imports neither a kernel nor an array
library: layers are calls on ops that an `OpTable` binds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pocketllm.errors import CheckpointError
from pocketllm.kernels.contract import Array, Arrays, OpTable
from pocketllm.models.rotary import Rotary

Naming = Literal["hf", "gguf"]


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A cache that grows with the sequence, in blocks.

    Attributes:
        entry_shape: shape of one entry, such as ``(kv_heads, head_dim)``.
        dtype: ``activation`` or a NumPy dtype name.
        tokens_per_entry: how many tokens share an entry; the block size is a multiple of it.
        window: entries older than this many tokens are never read again; None keeps all.
        shares: index of the layer whose cache is used instead of one of its own, or None.
    """

    entry_shape: tuple[int, ...]
    dtype: str = "activation"
    tokens_per_entry: int = 1
    window: int | None = None
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class StateCache:
    """A cache of fixed size for each sequence: a recurrent state, or the tail of a convolution.

    Attributes:
        shape: of one sequence's state.
        dtype: a NumPy dtype name; states are kept in float32 unless the family says otherwise.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"


CacheSpec = PagedCache | StateCache
LayerCaches = Mapping[str, CacheSpec]
"""A layer's caches by the name under which the layer's ops take them, such as ``key_cache``."""


@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows of a weight within a stored matrix that holds several: some of each of `groups` equal groups of rows.

    Attributes:
        groups: how many groups the stored rows form.
        group_rows: rows of a group.
        start, stop: which rows of each group they are.
    """

    groups: int
    group_rows: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Rows of the stored matrix."""
        return self.groups * self.group_rows


@dataclass(frozen=True, slots=True)
class ColumnSlice:
    """The columns of a weight within a stored matrix of `columns` that holds several side by side."""

    columns: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of a model.

    A matrix (two dimensions) is what products and embeddings read, held as the runtime likes; any other weight is plain
    numbers.

    Attributes:
        name: by which `build` asks for it.
        shape: its logical shape, slowest dimension first; checked against the file.
        stored_as: its name in the checkpoint; several weights may be parts of one tensor.
        optional: may be absent from the file.
        part: where it is, when the stored matrix holds other weights as well.
        unpair_heads: the file stores the rows of each of this many heads in pairs (0, d/2, 1, d/2 + 1, ...), as GGUF
            does for llama's q and k; the loader puts them back in halves. 0 leaves the rows as they are.
    """

    name: str
    shape: tuple[int, ...]
    stored_as: str
    optional: bool = False
    unpair_heads: int = 0
    part: RowSlice | ColumnSlice | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole stored tensor."""
        if self.part is None:
            return self.shape
        rows, columns = self.shape
        return (self.part.rows, columns) if isinstance(self.part, RowSlice) else (rows, self.part.columns)


class ModelConfig(Protocol):
    """What every family's configuration has; families add their own fields."""

    @property
    def model_type(self) -> str:
        """The family."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def context_length(self) -> int:
        """Tokens that the model was made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids that the configuration names (may be none)."""

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Every rotary embedding of the model: what is cached depends on a sequence's length through these alone."""


class Step(Protocol):
    """The arrays of one step, as the runtime holds them; see `pocketllm.runtimes.base.Batch` for their meaning."""

    @property
    def token_ids(self) -> Array:
        """[T]."""

    @property
    def positions(self) -> Array:
        """[T]."""

    @property
    def rope_lengths(self) -> Array:
        """[T], each token's sequence's."""

    @property
    def slots(self) -> Array:
        """[T], where each token's cache entry lies."""

    @property
    def query_start(self) -> Array:
        """[S + 1]."""

    @property
    def context_len(self) -> Array:
        """[S]."""

    @property
    def block_table(self) -> Array:
        """[S, B]."""

    @property
    def state_slots(self) -> Array:
        """[S]."""

    @property
    def save_slots(self) -> Array:
        """[T]."""

    @property
    def output_rows(self) -> Array:
        """[R]."""

    @property
    def hidden_rows(self) -> Array | None:
        """[H]; None where no hidden state is wanted."""

    @property
    def hidden(self) -> Array | None:
        """[T, hidden], for a head that goes on from another model's hidden states; None for every other model."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a step gives.

    Attributes:
        logits: [R, vocab], of ``step.output_rows``.
        hidden: [H, hidden], what the output head's product reads of ``step.hidden_rows``; None where there are none.
    """

    logits: Array
    hidden: Array | None


class Model(Protocol):
    """A built model: ops bound to weights."""

    def forward(self, step: Step, caches: Sequence[Arrays]) -> ModelOutput:
        """Run a step over every layer and write the caches."""


class Family(Protocol):
    """The module of a family."""

    def parse_config(self, naming: Naming, raw: Mapping[str, Any]) -> ModelConfig:
        """The configuration from ``config.json`` or GGUF metadata; CheckpointError names what is not understood."""

    def weights(self, config: Any, naming: Naming) -> tuple[WeightSpec, ...]:
        """Every weight that the model reads."""

    def unread_tensors(self, config: Any) -> tuple[str, ...]:
        """Beginnings of the names of tensors that a file may have and this model leaves alone: of other modalities,
        or of heads that are models of their own."""

    def cache_layout(self, config: Any) -> tuple[LayerCaches, ...]:
        """Each layer's caches."""

    def build(self, config: Any, weights: Arrays, ops: OpTable) -> Model:
        """Bind the model's ops; `weights` are prepared by the runtime, by `WeightSpec.name`."""

    def tiny_config(self) -> dict[str, Any]:
        """A ``config.json`` of a model small enough for tests."""


# Modules that are subjects shared by families rather than families.
_SHARED = frozenset(
    {
        "__init__",
        "attention_layer",
        "config_reader",
        "dense_decoder",
        "family",
        "output_head",
        "rotary",
        "windows",
    }
)

# Families that go on from another model's hidden states; by themselves they answer nothing.
_HEADS = frozenset({"qwen3_5_mtp"})


_ALSO_CALLED = {"qwen3_5_text": "qwen3_5"}
"""A family's other names: that of the text part of a multimodal model, saved by itself."""


@cache
def model_types() -> tuple[str, ...]:
    """Every family of models that answer by themselves, in alphabetical order."""
    names = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return tuple(sorted(names - _SHARED - _HEADS))


@cache
def family(model_type: str) -> Family:
    """The family of that ``model_type``; CheckpointError, listing the known ones, when there is none."""
    model_type = _ALSO_CALLED.get(model_type, model_type)
    if model_type not in model_types() and model_type not in _HEADS:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; the families are {', '.join(model_types())}"
        )
    return cast("Family", importlib.import_module(f"pocketllm.models.{model_type}"))
