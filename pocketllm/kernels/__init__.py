"""Ops: contracts, implementations and their discovery."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """`override` and `check` arrive when they are first used; see `pocketllm.kernels.overriding`."""
    if name not in ("override", "check"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("pocketllm.kernels.overriding"), name)
