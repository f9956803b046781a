"""Typed, frozen configuration of an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pocketllm import env
from pocketllm.errors import ConfigurationError

BACKENDS = ("torch", "triton", "cupy", "numba", "cpp")
DTYPES = ("auto", "float32", "bfloat16")

DEFAULT_MODEL = "smollm2"

MOST_QUEUED = 4096
"""Each request that runs or waits holds a thread of the server."""
MOST_THREADS = 1024

# NPUs pass here, so that loading can say what they would need.
_DEVICE = re.compile(r"auto|cpu|(cuda|npu)(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What an engine is started with.

    Attributes:
        model: a known name, a path (`os.PathLike` too), or a Hugging Face id.
        backend: ``auto`` or one of `BACKENDS`.
        device: ``auto`` (a CUDA device where there is one, else the CPU), ``cpu`` or ``cuda[:i]``.
        dtype: activations: ``auto`` (float32 on a CPU, bfloat16 on a GPU), ``float32`` or ``bfloat16``.
        max_model_len: context window of one request; None is the model's, shrunk to what the memory holds.
        max_num_seqs: how many sequences share a step.
        max_queue: how many requests may wait, to `MOST_QUEUED`; one more is refused.
        prefill_chunk: most prompt tokens that one step computes.
        decode_share: share of each prefill chunk's time that running replies get, 0 to 1.
        block_size: tokens of one KV block.
        kv_cache_mib: memory of the KV cache; None takes what is free less a reserve.
        prefix_cache: whether prompts that begin alike are computed once.
        threads: CPU threads, to `MOST_THREADS`; None leaves the backend's default.
        step_timeout: seconds after which a step that does not come back makes the engine give up.
        backend_options: further options of the backend; ``eos_token_id`` overrides the end-of-sequence ids.
        kernels: implementations of a user's own by op, see `pocketllm.kernels.overriding`.
    """

    model: str = DEFAULT_MODEL
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_queue: int = 256
    prefill_chunk: int = 512
    decode_share: float = 0.25
    block_size: int = 16
    kv_cache_mib: int | None = None
    prefix_cache: bool = True
    threads: int | None = None
    step_timeout: float = 300.0
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, ("auto", *BACKENDS))
        _one_of("dtype", self.dtype, DTYPES)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigurationError(f"device is {self.device!r}: give auto, cpu or cuda[:i]")
        for name, least, most in (
            ("max_model_len", 2, None),
            ("max_num_seqs", 1, None),
            ("max_queue", 1, MOST_QUEUED),
            ("prefill_chunk", 1, None),
            ("block_size", 1, None),
            ("kv_cache_mib", 1, None),
            ("threads", 1, MOST_THREADS),
        ):
            optional = name in ("max_model_len", "kv_cache_mib", "threads")
            _whole(name, getattr(self, name), least, most, optional=optional)
        if not isinstance(self.prefix_cache, bool):
            raise ConfigurationError(f"prefix_cache is {self.prefix_cache!r}: give True or False")
        if isinstance(self.decode_share, bool) or not isinstance(self.decode_share, int | float):
            raise ConfigurationError(f"decode_share is {self.decode_share!r}: give a number from 0 to 1")
        if not 0 <= self.decode_share <= 1:
            raise ConfigurationError(f"decode_share is {self.decode_share!r}: give a number from 0 to 1")
        timeout = self.step_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ConfigurationError(f"step_timeout is {timeout!r}: give seconds, a number above 0")
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigurationError(f"model is {self.model!r}: give a name, a path or a Hugging Face id")
        for name, form in (("backend_options", "option to value"), ("kernels", "op to implementation")):
            mapping = getattr(self, name)
            if not isinstance(mapping, Mapping):
                raise ConfigurationError(f"{name} is {mapping!r}: give a mapping from {form}")
            object.__setattr__(self, name, dict(mapping))

    @classmethod
    def from_env(cls, **arguments: Any) -> EngineArgs:
        """What the ``POCKETLLM_*`` variables say; `arguments` come before them, defaults after them.

        A variable whose field is among `arguments` is not read.

        Raises:
            ConfigurationError: a variable or an argument has a value that cannot be used; the message names it.
        """
        found = {}
        for name, setting in env.ENGINE_SETTINGS.items():
            value = None if name in arguments else setting.read()
            if value is None:
                continue
            try:
                cls(**{name: value})
            except ConfigurationError as error:
                raise ConfigurationError(f"environment variable {setting.name}: {error}") from None
            found[name] = value
        return cls(**found, **arguments)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}: give one of {', '.join(allowed)}")


def _whole(name: str, value: object, least: int, most: int | None, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name} is {value!r}: give a whole number {bounds}")
