"""Arrays of the backend ``torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT16_CACHE, FLOAT32, Mode
from pocketllm.kernels.contract import Implementation
from pocketllm.kernels.registry import BackendOpTable


class Adapter:
    """See `pocketllm.kernels.checking.arrays.Backend`."""

    name = "torch"
    modes = (FLOAT32, BFLOAT16, FLOAT16_CACHE)
    emulator: str | None = None

    def __init__(self, device: str | None = None) -> None:
        self.device = device or "cpu"
        if self.device.startswith("cuda"):
            if not torch.cuda.is_available():
                raise UnsupportedFeatureError(f"PyTorch sees no device {self.device!r} here: give cpu")
        elif self.device != "cpu":
            raise UnsupportedFeatureError(f"there is no device {self.device!r}: give cpu or cuda[:i]")

    def table(self, mode: Mode, overrides: Mapping[str, Implementation] | None = None) -> BackendOpTable:
        """See `Backend.table`."""
        return BackendOpTable(
            self.name, device=self.device, dtype=mode.dtype, cache_dtype=mode.cache_dtype, overrides=overrides
        )

    def put(self, array: npt.NDArray[Any] | QuantTensor, dtype: str) -> torch.Tensor:
        """See `Backend.put`."""
        if isinstance(array, QuantTensor):
            raise UnsupportedFeatureError(f"backend {self.name!r} computes on no quantised weights: they are expanded")
        return torch.tensor(array, dtype=getattr(torch, dtype), device=self.device)

    def get(self, array: torch.Tensor) -> npt.NDArray[Any]:
        """See `Backend.get`."""
        copy: npt.NDArray[Any] = (array.to(torch.float32) if array.is_floating_point() else array).cpu().numpy().copy()
        return copy

    def wait(self) -> None:
        """See `Backend.wait`."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
