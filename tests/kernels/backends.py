"""How the property tests put arrays into each backend and get them back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy.typing as npt
import torch

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Operand
from pocketllm.kernels.jit.loading_triton import will_load_as
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable
from pocketllm.kernels.registry import BackendOpTable


@dataclass(frozen=True)
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
    """What a backend has to offer to be tested."""

    name: str
    modes: tuple[Mode, ...]

    def table(self, mode: Mode) -> BackendOpTable:
        """The backend's ops on the device that tests run on."""

    def put(self, array: npt.NDArray[Any], dtype: str) -> Any:
        """The backend's own copy of `array`, whose numbers `dtype` can hold."""

    def get(self, array: Any) -> npt.NDArray[Any]:
        """A copy as a NumPy array; numbers that NumPy has no dtype for as float32."""


class TorchBackend:
    name = "torch"
    modes = (FLOAT32, BFLOAT16, FLOAT16_CACHE)

    def table(self, mode: Mode) -> BackendOpTable:
        return BackendOpTable("torch", device="cpu", dtype=mode.dtype, cache_dtype=mode.cache_dtype)

    def put(self, array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
        return torch.tensor(array, dtype=getattr(torch, dtype))

    def get(self, array: torch.Tensor) -> npt.NDArray[Any]:
        return (array.to(torch.float32) if array.is_floating_point() else array).numpy().copy()


class TritonBackend(TorchBackend):
    """Through Triton's interpreter unless the environment says otherwise (see `tests/conftest.py`)."""

    name = "triton"
    device = "cpu" if will_load_as() == "interpreter" else "cuda"

    def table(self, mode: Mode) -> BackendOpTable:
        return BackendOpTable("triton", device=self.device, dtype=mode.dtype, cache_dtype=mode.cache_dtype)

    def put(self, array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
        return super().put(array, dtype).to(self.device)

    def get(self, array: torch.Tensor) -> npt.NDArray[Any]:
        return super().get(array.cpu())


class NumbaBackend:
    name = "numba"
    modes = (FLOAT32,)

    def table(self, mode: Mode) -> BackendOpTable:
        return QuantizedOpTable("numba", device="cpu", dtype=mode.dtype, cache_dtype=mode.cache_dtype)

    def put(self, array: npt.NDArray[Any] | QuantTensor, dtype: str) -> Any:
        if isinstance(array, QuantTensor):
            return replace(array, data=array.data.copy())
        return array.astype(dtype)

    def get(self, array: Any) -> Any:
        return self.put(array, "float32" if isinstance(array, QuantTensor) else array.dtype)


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TorchBackend(), TritonBackend(), NumbaBackend())}
