"""Where compiled kernels are kept: a folder for each key, written under a lock, or nowhere."""

from __future__ import annotations

import hashlib
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


def write(file: Path, content: bytes) -> None:
    """The file appears whole or not at all; to be called under the folder's `build_lock`."""
    scratch = file.with_suffix(".part")
    scratch.write_bytes(content)
    os.replace(scratch, file)


def seal(file: Path) -> None:
    """Notes what a file holds, under the folder's `build_lock`, so that `is_intact` knows."""
    write(_seal_of(file), _digest(file))


def is_intact(file: Path) -> bool:
    """Whether a file is there and holds what it held when it was sealed: a damaged one has to be made anew."""
    note = _seal_of(file)
    return file.is_file() and note.is_file() and note.read_bytes() == _digest(file)


def _seal_of(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()
