"""Arrays of the backend ``cupy``: CuPy's on a GPU, NumPy's on the CPU through the emulator.

Neither library has bfloat16: such numbers are kept as uint16, their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels import bfloat16
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT16_CACHE, FLOAT32, Mode
from pocketllm.kernels.contract import Implementation
from pocketllm.kernels.jit.loading_cupy import select_device
from pocketllm.kernels.jit.toolchain_cupy import array_module, obstacle
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable


class Adapter:
    """See `pocketllm.kernels.checking.arrays.Backend`."""

    name = "cupy"
    modes = (FLOAT32, BFLOAT16, FLOAT16_CACHE)

    def __init__(self, device: str | None = None) -> None:
        self.device = device or ("cpu" if obstacle("cuda") else "cuda")
        complaint = obstacle(self.device)
        if complaint is not None:
            raise UnsupportedFeatureError(f"backend {self.name!r} cannot run on {self.device}: {complaint}")
        self.emulator = "the CUDA emulator" if self.device == "cpu" else None
        self._arrays = array_module(self.device)

    def table(self, mode: Mode, overrides: Mapping[str, Implementation] | None = None) -> QuantizedOpTable:
        """See `Backend.table`."""
        return QuantizedOpTable(
            self.name, device=self.device, dtype=mode.dtype, cache_dtype=mode.cache_dtype, overrides=overrides
        )

    def put(self, array: npt.NDArray[Any] | QuantTensor, dtype: str) -> Any:
        """See `Backend.put`. The thread's current device, on which ops make their results, becomes this one."""
        if self.device != "cpu":
            select_device(self.device)
        if isinstance(array, QuantTensor):
            return replace(array, data=self._arrays.array(array.data))
        return self._arrays.array(as_stored(array, dtype))

    def get(self, array: Any) -> Any:
        """See `Backend.get`."""
        if isinstance(array, QuantTensor):
            return replace(array, data=self.get(array.data))
        host: npt.NDArray[Any] = np.array(array.get() if self.device != "cpu" else array)
        if host.dtype == np.uint16:
            return bfloat16.from_bits(host)
        return host.astype(np.float32) if host.dtype == np.float16 else host

    def wait(self) -> None:
        """See `Backend.wait`."""
        if self.device != "cpu":
            self._arrays.cuda.get_current_stream().synchronize()


def as_stored(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """A copy in the dtype that kernels in CUDA C keep these numbers in."""
    return bfloat16.to_bits(array) if dtype == "bfloat16" else array.astype(dtype)
