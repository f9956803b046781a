"""A checkpoint, whatever its file format: configuration, tensors by name, and where tokenizer and template lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pocketllm.checkpoint.quant import QuantTensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without touching its data.

    Attributes:
        name: its name in the file.
        shape: logical shape, slowest dimension first.
        format: a key of `pocketllm.checkpoint.quant.FORMATS`.
        nbytes: bytes of its data.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int


class Checkpoint(ABC):
    """An opened checkpoint. Opening reads headers and maps files; tensor data stays on disk until it is used.

    Attributes:
        path: the directory (safetensors) or the first file (GGUF).
        naming: whose names the tensors and configuration keys carry: Hugging Face's or GGUF's.
        config: the parsed ``config.json``, or the GGUF metadata.
        model_type: the family: ``config["model_type"]`` or ``general.architecture``.
        generation_config: the parsed ``generation_config.json`` ({} when there is none, or for GGUF).
        tensors: every tensor of the checkpoint by name.
    """

    path: Path
    naming: Literal["hf", "gguf"]
    config: Mapping[str, Any]
    model_type: str
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def tensor(self, name: str) -> QuantTensor:
        """The tensor as stored, a view of the mapped file. CheckpointError when there is none of that name."""

    @abstractmethod
    def close(self) -> None:
        """Give the files up. Views handed out earlier stay valid; a file is unmapped when the last one is gone."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
