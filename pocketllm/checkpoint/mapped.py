"""Checkpoints whose tensors are byte ranges of memory-mapped files: what GGUF and safetensors have in common."""

from __future__ import annotations

import difflib
import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.checkpoint import Checkpoint, TensorInfo
from pocketllm.checkpoint.quant import FORMATS, QuantTensor, data_shape
from pocketllm.errors import CheckpointError

_NO_PERMISSION = "no permission to read it; check its owner and mode"


class MappedFile:
    """A regular file, mapped read-only.

    Attributes:
        path: where it lies.
        size: bytes in it when it was opened.

    Raises:
        CheckpointError: there is no such file, it is a folder or device, or it may not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise CheckpointError(f"{path}: this is a folder where a file is needed")
            if not stat.S_ISREG(mode):  # opening a pipe would wait for its writer
                raise CheckpointError(
                    f"{path}: this is no regular file but a pipe, socket or device: copy it to a file"
                )
            with path.open("rb") as file:
                self.size = file.seek(0, os.SEEK_END)
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else None
        except CheckpointError:
            raise
        except PermissionError as error:
            raise CheckpointError(f"{path}: {_NO_PERMISSION}") from error
        except (OSError, ValueError) as error:  # ValueError: a path with a null, or a file that shrinks meanwhile
            raise CheckpointError(f"{path}: cannot be read: {error}") from error

    def read(self, start: int, stop: int) -> bytes:
        """Copy bytes; fewer are returned where the file ends before `stop`."""
        return self._map[start:stop] if self._map is not None else b""

    def view(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Map bytes as a read-only uint8 array [nbytes]; the range must lie inside the file."""
        if self._map is None:
            raise CheckpointError(f"{self.path}: the checkpoint has been closed, its tensors can no longer be read")
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def close(self) -> None:
        """Let go of the mapping. It is undone when the last view of it is gone, so that no view can ever dangle."""
        self._map = None


def list_directory(directory: Path) -> list[str]:
    """The names in a directory, sorted; CheckpointError when it cannot be listed."""
    try:
        return sorted(os.listdir(directory))
    except PermissionError as error:
        raise CheckpointError(f"{directory}: {_NO_PERMISSION}") from error
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be listed: {error}") from error


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place: `info.nbytes` bytes of `file` from byte `start` on."""

    info: TensorInfo
    file: MappedFile
    start: int


class MappedCheckpoint(Checkpoint):
    """A checkpoint over mapped files; a subclass reads their headers.

    Args:
        path: what error messages call the checkpoint.
        files: the files it consists of.
        stored: the tensors of all files; their names differ.
    """

    def __init__(self, path: Path, files: Iterable[MappedFile], stored: Iterable[StoredTensor]) -> None:
        self.path = path
        self._files = tuple(files)
        self._stored = {tensor.info.name: tensor for tensor in stored}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({n: t.info for n, t in self._stored.items()})

    def tensor(self, name: str) -> QuantTensor:
        """The tensor as stored, a read-only view of the mapped file.

        Raises:
            CheckpointError: there is none of that name, or the checkpoint has been closed.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(self._missing(name))
        info = stored.info
        data = stored.file.view(stored.start, info.nbytes)
        return QuantTensor(data.reshape(data_shape(FORMATS[info.format], info.shape)), info.format, info.shape)

    def close(self) -> None:
        """Unmap the files, each as soon as no view of it is left. Tensors can no longer be asked for."""
        for file in self._files:
            file.close()

    def _missing(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._stored, n=1)
        hint = f"; the nearest name is {near[0]!r}" if near else ""
        return (
            f"{self.path}: missing tensor {name!r}: the checkpoint is whole, but holds no tensor of that name{hint}. "
            "It was probably made for another model family or by another converter"
        )


def check_contiguous(file: MappedFile, stored: Iterable[StoredTensor], start: int, alignment: int) -> int:
    """Check that tensors fill a file without overlap or hole, each padded to `alignment`, in whatever order.

    A damaged type, shape or offset that still points into the file shows here, where it would else be read as numbers.

    Returns:
        The byte where the last tensor ends.

    Raises:
        CheckpointError: they do not; the message names the two tensors between which it fails.
    """
    before, end = "the header", start
    for tensor in sorted(stored, key=lambda tensor: (tensor.start, tensor.info.nbytes)):
        info = tensor.info
        padded = start + -(-(end - start) // alignment) * alignment
        if tensor.start != padded:
            fault = "overlaps with it" if tensor.start < end else "leaves a hole"
            raise CheckpointError(
                f"{file.path}: {before} ends at byte {end}, so tensor {info.name!r} should begin at byte {padded}, but "
                f"begins at {tensor.start} and {fault}: a type, shape or offset is damaged"
            )
        before, end = f"tensor {info.name!r} ({info.format}, shape {info.shape})", tensor.start + info.nbytes
    return end
