"""PyTorch's arrays, for the runtimes that compute on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pocketllm.checkpoint.quant import QuantTensor, dequantize
from pocketllm.models.family import WeightSpec
from pocketllm.runtimes.arrays import ArrayLibrary, Host

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchArrays(ArrayLibrary):
    """Tensors on one device."""

    def __init__(self, device: str, dtype: str) -> None:
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]

    def itemsize(self, dtype: str) -> int:
        """See `ArrayLibrary.itemsize`."""
        return self._dtype(dtype).itemsize

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """See `ArrayLibrary.zeros`."""
        return torch.zeros(tuple(shape), dtype=self._dtype(dtype), device=self.device)

    def _dtype(self, dtype: str) -> torch.dtype:
        named: torch.dtype = self.dtype if dtype == "activation" else getattr(torch, dtype)
        return named

    def from_host(self, array: Host) -> torch.Tensor:
        """See `ArrayLibrary.from_host`."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def to_host(self, array: torch.Tensor) -> Host:
        """See `ArrayLibrary.to_host`."""
        return array.cpu().numpy()

    def read_rows(self, array: torch.Tensor, rows: Sequence[int]) -> bytes:
        """See `ArrayLibrary.read_rows`."""
        return array[list(rows)].cpu().reshape(-1).view(torch.uint8).numpy().tobytes()

    def write_rows(self, array: torch.Tensor, rows: Sequence[int], data: bytes) -> None:
        """See `ArrayLibrary.write_rows`."""
        if rows:
            values = torch.frombuffer(bytearray(data), dtype=array.dtype).reshape(len(rows), *array.shape[1:])
            array[list(rows)] = values.to(self.device)

    def copy_rows(self, array: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> None:
        """See `ArrayLibrary.copy_rows`."""
        array[list(target)] = array[list(source)]


def expanded(spec: WeightSpec, tensor: QuantTensor, *, device: str, dtype: str) -> torch.Tensor:
    """A weight as plain numbers: matrices in the activation dtype.

    What is no matrix (norms, biases, convolutions) is float32 by the ops' contracts.
    """
    values = torch.from_numpy(dequantize(tensor)).reshape(spec.shape)
    return values.to(device=device, dtype=DTYPES[dtype] if values.ndim == 2 else torch.float32)


def torch_build(device: str) -> tuple[str, ...]:
    """What the bits of PyTorch's operations depend on: its version, and the processor or device."""
    cuda = torch.device(device).type == "cuda"
    processor = torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}", processor
