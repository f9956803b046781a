"""The reference backend: plain PyTorch operations in float32 or bfloat16, on any torch device.

Weights are expanded when they are loaded. Its products are not the same bits for every batch size, so it declares no
batch invariance.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.models.family import ModelConfig, WeightSpec
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.op_runtime import OpRuntime
from pocketllm.runtimes.torch_arrays import TorchArrays, expanded, torch_build


class TorchRuntime(OpRuntime):
    """See `pocketllm.runtimes.base.Runtime`."""

    name = "torch"
    batch_invariant = "matrix products of PyTorch round differently for different batch sizes"

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        super().__init__(config, options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """See `Runtime.supports`."""
        reasons = cls.unsupported_caches(config)
        device = torch.device(options.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            reasons += (f"device {options.device} (PyTorch sees {torch.cuda.device_count()} CUDA devices)",)
        return reasons

    def device_memory(self) -> tuple[int, int] | None:
        """See `Runtime.device_memory`."""
        if not self._options.device.startswith("cuda"):
            return None
        free, total = torch.cuda.mem_get_info(self._options.device)
        return total, free

    def make_arrays(self, options: RuntimeOptions) -> TorchArrays:
        """See `OpRuntime.make_arrays`."""
        return TorchArrays(options.device, options.dtype)

    def make_ops(self, options: RuntimeOptions) -> BackendOpTable:
        """See `OpRuntime.make_ops`."""
        return BackendOpTable("torch", device=options.device, dtype=options.dtype, overrides=options.overrides)

    def device_context(self) -> AbstractContextManager[None]:
        """See `OpRuntime.device_context`: nothing here is differentiated."""
        return torch.inference_mode()

    def compiled_for(self) -> tuple[str, ...]:
        """See `OpRuntime.compiled_for`."""
        return torch_build(self._options.device)

    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> torch.Tensor:
        """See `OpRuntime.prepare`."""
        return expanded(spec, tensor, device=self._options.device, dtype=self._options.dtype)
