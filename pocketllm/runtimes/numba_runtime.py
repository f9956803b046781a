"""The CPU backend that needs no compiler: kernels compiled by Numba, block-quantised weights computed as they are.

Activations are float32. A row's bits depend on its own sequence alone, at any number of threads: threads split outputs,
never sums. Weights are repacked once, tensor by tensor; matrices in formats that no kernel reads become float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import QuantTensor, dequantize
from pocketllm.kernels.interleaved import interleaved
from pocketllm.kernels.jit.builds import QUEUE, BuildReport
from pocketllm.kernels.jit.toolchain_numba import compiler, pool, reserve_threads
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable
from pocketllm.models.family import ModelConfig, WeightSpec
from pocketllm.runtimes.arrays import NumpyArrays
from pocketllm.runtimes.base import Progress, RuntimeOptions
from pocketllm.runtimes.op_runtime import OpRuntime


class NumbaRuntime(OpRuntime):
    """See `pocketllm.runtimes.base.Runtime`.

    Attributes:
        builds: what compiling the model's kernels took; None before `load`.
    """

    name = "numba"
    batch_invariant = None

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        self._threads = reserve_threads(options.threads)
        super().__init__(config, options)
        self.builds: BuildReport | None = None

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """See `Runtime.supports`."""
        reasons = cls.unsupported_caches(config)
        if options.device != "cpu":
            reasons += (f"device {options.device} (Numba kernels run on the CPU)",)
        if options.dtype != "float32":
            reasons += (f"dtype {options.dtype} (Numba kernels compute in float32)",)
        return reasons

    def make_arrays(self, options: RuntimeOptions) -> NumpyArrays:
        """See `OpRuntime.make_arrays`."""
        return NumpyArrays()

    def make_ops(self, options: RuntimeOptions) -> QuantizedOpTable:
        """See `OpRuntime.make_ops`."""
        return QuantizedOpTable("numba", device=options.device, dtype=options.dtype, overrides=options.overrides)

    def device_context(self) -> AbstractContextManager[None]:
        """See `OpRuntime.device_context`: the number of threads is a setting of the calling thread."""
        return pool(self._threads)

    def compiled_for(self) -> tuple[str, ...]:
        """See `OpRuntime.compiled_for`."""
        return compiler()

    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> Any:
        """See `OpRuntime.prepare`: matrices interleaved, so that a tied embedding and head are one; vectors float32."""
        if len(spec.shape) == 2:
            return interleaved(tensor)
        return np.array(dequantize(tensor), dtype=np.float32).reshape(spec.shape)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """See `Runtime.load`. Every kernel that the model, sampling and scoring need is compiled or loaded here."""
        super().load(checkpoint, progress)
        self.builds = QUEUE.build_all(progress)
