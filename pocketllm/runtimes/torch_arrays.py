"""PyTorch's arrays, for the runtimes that compute on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pocketllm.runtimes.arrays import ArrayLibrary, Host

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchArrays(ArrayLibrary):
    """Tensors on one device."""

    def __init__(self, device: str, dtype: str) -> None:
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self.itemsize = self.dtype.itemsize

    def zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """See `ArrayLibrary.zeros`."""
        return torch.zeros(tuple(shape), dtype=self.dtype, device=self.device)

    def from_host(self, array: Host) -> torch.Tensor:
        """See `ArrayLibrary.from_host`."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def to_host(self, array: torch.Tensor) -> Host:
        """See `ArrayLibrary.to_host`."""
        return array.cpu().numpy()

    def read_blocks(self, array: torch.Tensor, blocks: Sequence[int]) -> bytes:
        """See `ArrayLibrary.read_blocks`."""
        return array[list(blocks)].contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def write_blocks(self, array: torch.Tensor, blocks: Sequence[int], data: bytes) -> None:
        """See `ArrayLibrary.write_blocks`."""
        if blocks:
            values = torch.frombuffer(bytearray(data), dtype=array.dtype).reshape(len(blocks), *array.shape[1:])
            array[list(blocks)] = values.to(self.device)

    def copy_blocks(self, array: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> None:
        """See `ArrayLibrary.copy_blocks`."""
        array[list(target)] = array[list(source)]
