"""Where compiled kernels are kept: a folder for each key, written under a lock, or nowhere."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without it builds twice where two processes start at once; writes are atomic
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_warned: set[Path] = set()


def kernel_folder(root: Path, toolchain: str, key: str) -> Path | None:
    """The folder for the compiled code of one key, made where it is missing; None where it cannot be used.

    A folder that cannot be written is no error: kernels are compiled anew in each process, and one warning says so.
    """
    folder = root / "kernels" / toolchain / key
    reason = _unusable(folder)
    if reason is None:
        return folder
    _warn_once(root, reason)
    return None


def _unusable(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return f"{folder} belongs to another user, whose code would be run"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return str(error)


def _warn_once(root: Path, reason: str) -> None:
    if root in _warned:
        return
    _warned.add(root)
    logger.warning(
        "compiled kernels cannot be kept below %s (%s); they are compiled at every start. "
        "Set POCKETLLM_CACHE_DIR to a folder of your own",
        root,
        reason,
    )


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Held by the one process that builds in `folder`; the others wait, then find what it has built."""
    with (folder / ".lock").open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
