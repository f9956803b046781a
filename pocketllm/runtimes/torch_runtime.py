"""The reference backend: plain PyTorch operations in float32 or bfloat16, on any torch device.

Weights are expanded when they are loaded. Its products are not the same bits for every batch size, so it declares no
batch invariance.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pocketllm.checkpoint.quant import QuantTensor, dequantize
from pocketllm.kernels.contract import Array
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.models.family import ModelConfig, WeightSpec
from pocketllm.runtimes.base import Batch, IntArray, RuntimeOptions, SamplingRows, Scores, StepOutput
from pocketllm.runtimes.op_runtime import DeviceStep, OpRuntime
from pocketllm.runtimes.torch_arrays import DTYPES, TorchArrays


class TorchRuntime(OpRuntime):
    """See `pocketllm.runtimes.base.Runtime`."""

    name = "torch"
    batch_invariant = "matrix products of PyTorch round differently for different batch sizes"

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self._options = options
        super().__init__(config, options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """See `Runtime.supports`."""
        reasons = cls.unsupported_caches(config)
        if options.device.startswith("cuda") and not torch.cuda.is_available():
            reasons += (f"device {options.device} (PyTorch sees no CUDA device)",)
        return reasons

    def make_arrays(self, options: RuntimeOptions) -> TorchArrays:
        """See `OpRuntime.make_arrays`."""
        return TorchArrays(options.device, options.dtype)

    def make_ops(self, options: RuntimeOptions) -> BackendOpTable:
        """See `OpRuntime.make_ops`."""
        return BackendOpTable("torch", device=options.device, dtype=options.dtype)

    @torch.inference_mode()
    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> torch.Tensor:
        """See `OpRuntime.prepare`: expanded to the activation dtype."""
        values = torch.from_numpy(dequantize(tensor)).reshape(spec.shape)
        return values.to(device=self._options.device, dtype=DTYPES[self._options.dtype])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> StepOutput:
        """See `Runtime.forward`."""
        return super().forward(batch)

    def device_step(self, batch: Batch) -> DeviceStep:
        """See `OpRuntime.device_step`. What steers Python loops stays on the host."""
        return replace(super().device_step(batch), query_start=batch.query_start, context_len=batch.context_len)

    @torch.inference_mode()
    def sample(self, logits: Array, rows: SamplingRows) -> IntArray:
        """See `Runtime.sample`."""
        return super().sample(logits, rows)

    @torch.inference_mode()
    def score(self, logits: Array, targets: IntArray, k: int) -> Scores:
        """See `Runtime.score`."""
        return super().score(logits, targets, k)
