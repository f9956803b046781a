"""Arrays of the backend ``numba``: NumPy's, and quantised tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import FLOAT32, Mode
from pocketllm.kernels.contract import Implementation
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable


class Adapter:
    """See `pocketllm.kernels.checking.arrays.Backend`."""

    name = "numba"
    modes = (FLOAT32,)
    device = "cpu"
    emulator = None

    def __init__(self, device: str | None = None) -> None:
        if device not in (None, self.device):
            raise UnsupportedFeatureError(f"backend {self.name!r} runs on the CPU, not on {device!r}: give cpu")

    def table(self, mode: Mode, overrides: Mapping[str, Implementation] | None = None) -> QuantizedOpTable:
        """See `Backend.table`."""
        return QuantizedOpTable(
            self.name, device=self.device, dtype=mode.dtype, cache_dtype=mode.cache_dtype, overrides=overrides
        )

    def put(self, array: npt.NDArray[Any] | QuantTensor, dtype: str) -> Any:
        """See `Backend.put`."""
        if isinstance(array, QuantTensor):
            return replace(array, data=array.data.copy())
        return array.astype(dtype)

    def get(self, array: Any) -> Any:
        """See `Backend.get`."""
        return self.put(array, "float32" if isinstance(array, QuantTensor) else array.dtype)

    def wait(self) -> None:
        """See `Backend.wait`."""
