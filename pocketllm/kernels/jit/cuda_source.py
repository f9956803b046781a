"""A kernel in CUDA C as it lies in a file, with its parameters' types, which are declared here and nowhere else.

Both compilers get the same translation unit. It includes the file and compares the kernel's type with the declared
one, so that a launch cannot pass what the kernel does not take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.sources import digest

INCLUDE_FOLDER = Path(__file__).resolve().parent.parent
"""Kernels include files by their path in here."""

_INCLUDE_OR_COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|^\s*#\s*include\s*"([^"\n]+)"', re.MULTILINE | re.DOTALL)

# Name in contracts: (name in CUDA C, NumPy's, `struct`'s padded to 8 bytes). NumPy has no bfloat16; there an array of
# them holds their bits.
_TYPES = {
    "float32": ("float", "float32", "f4x"),
    "float64": ("double", "float64", "d"),
    "float16": ("float16", "float16", ""),
    "bfloat16": ("bfloat16", "uint16", ""),
    "int8": ("signed char", "int8", "b7x"),
    "uint8": ("unsigned char", "uint8", "B7x"),
    "int32": ("int", "int32", "i4x"),
    "uint32": ("unsigned", "uint32", "I4x"),
    "int64": ("long long", "int64", "q"),
    "uint64": ("unsigned long long", "uint64", "Q"),
    "bool": ("bool", "bool", "?7x"),
}
_STORAGE = {dtype: np.dtype(numpys) for dtype, (_, numpys, _) in _TYPES.items()}


def c_type(dtype: str) -> str:
    """The name of a dtype in CUDA C; `bfloat16` and `float16` are defined in ``numerics.cuh``."""
    return _TYPES[dtype][0]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's and CuPy's dtype for arrays of these numbers."""
    return _STORAGE[dtype]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel; see `array`, `readonly` and `scalar`."""

    dtype: str
    is_array: bool
    writable: bool = False
    optional: bool = False

    @property
    def declaration(self) -> str:
        """Its type in CUDA C."""
        const = "const " if self.is_array and not self.writable else ""
        return f"{const}{c_type(self.dtype)}{'*' if self.is_array else ''}"

    @property
    def storage(self) -> np.dtype[Any]:
        """See `storage_dtype`."""
        return _STORAGE[self.dtype]

    @property
    def packing(self) -> str:
        """8 bytes that hold it, as `struct` says it."""
        return "Q" if self.is_array else _TYPES[self.dtype][2]

    @property
    def number_type(self) -> type[np.generic[Any]]:
        """NumPy's type of the number that is passed, an address in place of an array."""
        return np.uint64 if self.is_array else self.storage.type

    def complaint(self, argument: Any, array_type: type[Any], device: int | None = None) -> str | None:
        """Why this argument cannot be passed; None where it can.

        Args:
            argument: what was given.
            array_type: the class of the library's arrays.
            device: the GPU that they have to lie on; None where they lie on the host.
        """
        if not self.is_array:
            return None if self._is_number(argument) else f"{argument!r} is no {self.dtype}"
        if argument is None:
            return None if self.optional else "it is missing"
        if not isinstance(argument, array_type):
            return f"it is a {type(argument).__name__}, not a {array_type.__module__}.{array_type.__name__}"
        if device is not None and argument.data.device_id != device:
            return f"it lies on device {argument.data.device_id}, and the kernel runs on device {device}"
        if argument.dtype != self.storage:
            return f"its dtype is {argument.dtype}, not {self.storage}"
        if not argument.flags.c_contiguous:
            return "its numbers do not lie one after another: pass a contiguous copy"
        if self.writable and not getattr(argument.flags, "writeable", True):
            return "the kernel writes to it, and it is read-only"
        return None

    def _is_number(self, argument: Any) -> bool:
        kind = self.number_type
        if issubclass(kind, np.floating):
            if isinstance(argument, float | np.floating) and not math.isfinite(argument):
                return True
            is_real = isinstance(argument, int | float | np.integer | np.floating)
            return is_real and bool(abs(argument) <= float(np.finfo(kind).max))
        if isinstance(argument, bool | np.bool_):
            return kind is np.bool_
        if not isinstance(argument, int | np.integer) or kind is np.bool_:
            return False
        limits = np.iinfo(self.storage)
        return bool(limits.min <= argument <= limits.max)


def _known(dtype: str) -> str:
    if dtype not in _TYPES:
        raise TypeError(f"a kernel takes no {dtype}: declare one of {', '.join(_TYPES)}")
    return dtype


def array(dtype: str, *, optional: bool = False) -> Parameter:
    """A contiguous array that a kernel writes; `optional`: None may be passed, which the kernel sees as null."""
    return Parameter(_known(dtype), is_array=True, writable=True, optional=optional)


def readonly(dtype: str, *, optional: bool = False) -> Parameter:
    """A contiguous array that a kernel only reads; `optional`: None may be passed, which the kernel sees as null."""
    return Parameter(_known(dtype), is_array=True, optional=optional)


def scalar(dtype: str) -> Parameter:
    """A number; those of 16 bits are passed as float32."""
    if not _TYPES[_known(dtype)][2]:
        raise TypeError(f"a kernel takes no single {dtype}: declare float32")
    return Parameter(dtype, is_array=False)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel in a file.

    Attributes:
        path: the file.
        function: the kernel with its template's arguments, such as ``rms_norm<float>``.
        parameters: by name, in order.
    """

    path: Path
    function: str
    parameters: Mapping[str, Parameter]

    @property
    def name(self) -> str:
        """For messages: its op and its own name, such as ``rms_norm:rms_norm<float>``."""
        return f"{self.path.parent.name}:{self.function}"

    def translation_unit(self) -> str:
        """The code that both compilers get."""
        types = ", ".join(parameter.declaration for parameter in self.parameters.values())
        return (
            f'#include "{self.path}"\n'
            "template <class, class> constexpr bool is_declared = false;\n"
            "template <class T> constexpr bool is_declared<T, T> = true;\n"
            f"static_assert(is_declared<decltype(&{self.function}), void (*)({types})>,\n"
            f'              "the kernel takes other arguments than Python declares: {types}");\n'
        )

    def files(self) -> tuple[Path, ...]:
        """The file and every one that it includes, directly or not.

        Raises:
            ConfigurationError: one is not there or no text.
        """
        found: list[Path] = []
        waiting = [self.path]
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found.append(path)
            waiting.extend(self._included(path))
        return tuple(sorted(found))

    def key(self, *facts: str) -> str:
        """A key of everything that the kernel is compiled from, and of `facts`."""
        return digest(self.files(), self.translation_unit(), *facts)

    def _included(self, path: Path) -> list[Path]:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"kernel {self.name}: {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"kernel {self.name}: {path} is not UTF-8 ({error}): convert it") from error
        included = []
        for name in filter(None, _INCLUDE_OR_COMMENT.findall(text)):
            candidates = (path.parent / name, INCLUDE_FOLDER / name)
            present = [candidate.resolve() for candidate in candidates if candidate.is_file()]
            if not present:
                raise ConfigurationError(
                    f"kernel {self.name}: {path} includes {name!r}, which is neither beside it nor in {INCLUDE_FOLDER}"
                )
            included.append(present[0])
        return included
