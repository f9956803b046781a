"""How this process has Triton: as a compiler for a GPU, or as an interpreter on the CPU; it cannot have both.

Triton decides once, when it is imported, for its own library's functions. So the choice is made here, before anything
imports it, and nothing here does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from typing import Literal

from pocketllm import env
from pocketllm.kernels.jit.store import kernel_folder

Loaded = Literal["compiler", "interpreter"]

_INTERPRET = "TRITON_INTERPRET"


def loaded_as() -> Loaded | None:
    """What Triton was imported as; None while it is not imported."""
    language = sys.modules.get("triton.language")
    if language is None:
        return None
    return "compiler" if isinstance(language.sum, sys.modules["triton.runtime.jit"].JITFunction) else "interpreter"


def will_load_as() -> Loaded:
    """What it is, or what its environment variable will make of it."""
    wants_interpreter = os.environ.get(_INTERPRET, "").lower() in ("1", "true", "yes", "on", "y")
    return loaded_as() or ("interpreter" if wants_interpreter else "compiler")


def choose_interpreter() -> None:
    """Kernels that are imported from now on are interpreted; the caller has seen that Triton is no compiler yet."""
    os.environ[_INTERPRET] = "1"


@cache
def choose_compiler() -> None:
    """Keeps what is compiled from now on in the cache folder, or until the end of the process where it is not usable.

    Triton's own cache does what is left of the life cycle: its key covers source, called functions, options,
    architecture and version, and its files appear whole or not at all.
    """
    folder = kernel_folder(env.CACHE_DIR.read(), "triton", "cache")
    os.environ["TRITON_CACHE_DIR"] = str(folder) if folder is not None else _temporary_folder().name


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pocketllm-triton-")
