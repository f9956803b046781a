"""Which contenders there are, and why one of them cannot take part."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.bench.contenders.base import Setup
from pocketllm.bench.process import Remote

_PACKAGE = "pocketllm.bench.contenders"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine.

    Attributes:
        name: as it stands in tables.
        made_by: its class, as ``module:name``; the module imports the engine.
        requires: the packages it needs, by the format of the checkpoint: ``gguf``, ``safetensors``. A format that is
            absent is one that it does not read.
    """

    name: str
    made_by: str
    requires: Mapping[str, tuple[str, ...]]

    def lacks(self, path: Path) -> str | None:
        """Why it cannot run the checkpoint at `path`; None when it can."""
        kind = "gguf" if path.is_file() else "safetensors"
        if kind not in self.requires:
            return f"reads no {kind} checkpoint"
        missing = [package for package in self.requires[kind] if importlib.util.find_spec(package) is None]
        return f"not installed: {', '.join(missing)} (pip install 'pocketllm[bench]')" if missing else None


_HUGGING_FACE = ("transformers", "torch")

PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", f"{_PACKAGE}.llama_cpp:LlamaCpp", {"gguf": ("llama_cpp",)}),
        Peer(
            "transformers",
            f"{_PACKAGE}.transformers:Transformers",
            {"gguf": (*_HUGGING_FACE, "accelerate", "gguf"), "safetensors": _HUGGING_FACE},
        ),
    )
}


def start(name: str, setup: Setup) -> Remote:
    """A contender in a process of its own: a peer, or else one of our backends.

    Raises:
        EngineError: it cannot be made; the message says why.
    """
    arguments: dict[str, Any] = {"setup": setup}
    if name in PEERS:
        # Loading draws bars where nobody looks.
        return Remote(name, PEERS[name].made_by, arguments, {"TQDM_DISABLE": "1"})
    return Remote(name, f"{_PACKAGE}.pocketllm:PocketLLM", arguments | {"backend": name})
