"""How arrays get into each backend and back, so that its kernels can be checked.

An adapter is the class `Adapter` of a module ``arrays_<backend>.py`` beside this one; lying there is all the
registration there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import numpy.typing as npt

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.contract import Implementation, Operand
from pocketllm.kernels.registry import BackendOpTable, imported

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Mode:
    """The dtypes of one run: of activations and weights, and of the key and value cache."""

    dtype: str
    cache_dtype: str

    def __str__(self) -> str:
        return self.dtype if self.dtype == self.cache_dtype else f"{self.dtype}-cache_{self.cache_dtype}"

    def dtype_of(self, operand: Operand) -> str:
        """The dtype in which the backend holds this operand."""
        named = {"activation": self.dtype, "weight": self.dtype, "cache": self.cache_dtype}
        return named.get(operand.dtype, operand.dtype)


FLOAT32 = Mode("float32", "float32")
BFLOAT16 = Mode("bfloat16", "bfloat16")
FLOAT16_CACHE = Mode("float32", "float16")


class Backend(Protocol):
    """What a backend has to offer to be checked.

    Attributes:
        name: the backend.
        modes: the dtypes that its kernels are checked in.
        device: where they run.
        emulator: what runs them there in place of the processor that they are made for, so that times say nothing;
            None where nothing does.
    """

    name: str
    modes: tuple[Mode, ...]
    device: str
    emulator: str | None

    def table(self, mode: Mode, overrides: Mapping[str, Implementation] | None = None) -> BackendOpTable:
        """The backend's ops on the device, some of them replaced."""

    def put(self, array: npt.NDArray[Any], dtype: str) -> Any:
        """The backend's own copy of `array`, whose numbers `dtype` can hold."""

    def get(self, array: Any) -> npt.NDArray[Any]:
        """A copy as a NumPy array; numbers that NumPy has no dtype for as float32."""

    def wait(self) -> None:
        """Returns when everything that was called has run."""


@cache
def backend_names() -> tuple[str, ...]:
    """The backends that have an adapter, in alphabetical order."""
    return tuple(sorted(path.stem.removeprefix("arrays_") for path in _FOLDER.glob("arrays_*.py")))


@cache
def backend(name: str, device: str | None = None) -> Backend:
    """The adapter of a backend, on `device` or on the one that it chooses itself.

    Raises:
        UnsupportedFeatureError: there is no adapter of that name, its package is not installed, or it has no such
            device.
    """
    if name not in backend_names():
        raise UnsupportedFeatureError(f"there is no backend {name!r} to check; there are {', '.join(backend_names())}")
    module = imported(f"{__name__}_{name}", name)
    return cast("Backend", module.Adapter(device))
