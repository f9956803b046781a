"""CUDA C's backend: compiled by NVRTC for an NVIDIA GPU; on a CPU, when asked for by name, in an emulator.

The emulator runs the same sources on g++, a fiber for each of CUDA's threads: it proves them, no more.

Every op has one configuration of threads and tiles whatever a step holds, and no reduction is split by the batch's
shape; so a sequence's logits do not depend on what runs beside it. Block-quantised weights are computed as they are.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import QuantTensor, dequantize
from pocketllm.kernels import bfloat16
from pocketllm.kernels.contract import Array
from pocketllm.kernels.jit.builds import QUEUE, BuildReport
from pocketllm.kernels.jit.loading_cupy import DeviceStream, device_of, memory_of
from pocketllm.kernels.jit.toolchain_cupy import compiled_with, obstacle
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable
from pocketllm.models.family import ModelConfig, WeightSpec
from pocketllm.runtimes.base import Batch, Progress, RuntimeOptions, StepOutput
from pocketllm.runtimes.cupy_arrays import CupyArrays
from pocketllm.runtimes.decode_graphs import DecodeGraphs, is_decode
from pocketllm.runtimes.op_runtime import DeviceStep, OpRuntime

logger = logging.getLogger(__name__)


class CupyRuntime(OpRuntime):
    """See `pocketllm.runtimes.base.Runtime`.

    Attributes:
        builds: what compiling the model's kernels took; None before `load`.
    """

    name = "cupy"
    batch_invariant = None

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        if options.device == "cpu":
            logger.warning("backend cupy emulates its kernels on the CPU: this proves them, and is very slow")
        self._stream = None if options.device == "cpu" else DeviceStream(device_of(options.device))
        self._graphs = None
        if self._stream is not None:
            self._graphs = DecodeGraphs(self.device_step, self._logits_of, self._stream)
        super().__init__(config, options)
        self.builds: BuildReport | None = None

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """See `Runtime.supports`."""
        reasons = cls.unsupported_caches(config)
        reason = obstacle(options.device)
        return reasons if reason is None else (*reasons, f"device {options.device}: {reason}")

    def device_memory(self) -> tuple[int, int] | None:
        """See `Runtime.device_memory`."""
        return None if self._options.device == "cpu" else memory_of(device_of(self._options.device))

    def make_arrays(self, options: RuntimeOptions) -> CupyArrays:
        """See `OpRuntime.make_arrays`."""
        return CupyArrays(options.device, options.dtype)

    def make_ops(self, options: RuntimeOptions) -> QuantizedOpTable:
        """See `OpRuntime.make_ops`."""
        return QuantizedOpTable("cupy", device=options.device, dtype=options.dtype, overrides=options.overrides)

    def compiled_for(self) -> tuple[str, ...]:
        """See `OpRuntime.compiled_for`."""
        return compiled_with(self._options.device)

    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> Any:
        """See `OpRuntime.prepare`: matrices in blocks as they are, others in the activation dtype, the rest float32."""
        move = self._arrays.from_host
        if len(spec.shape) == 2 and tensor.format in FORMATS_WITH_CODES:
            return replace(tensor, data=move(tensor.data))
        values = dequantize(tensor).reshape(spec.shape)
        if len(spec.shape) == 2 and self._options.dtype == "bfloat16":
            return move(bfloat16.to_bits(values))
        return move(values)

    def device_context(self) -> contextlib.AbstractContextManager[Any]:
        """See `OpRuntime.device_context`: a stream of its own on the device."""
        return self._stream or contextlib.nullcontext()

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """See `Runtime.load`. Every kernel that the model, sampling and scoring need is compiled or loaded here."""
        super().load(checkpoint, progress)
        self.builds = QUEUE.build_all(progress)

    def allocate(self, blocks: int, states: int) -> None:
        """See `Runtime.allocate`."""
        if self._graphs is not None:
            self._graphs.drop()
        super().allocate(blocks, states)

    def step(self, batch: Batch) -> StepOutput:
        """See `OpRuntime.step`. On a GPU a decode step is a graph."""
        if self._graphs is not None and is_decode(batch):
            return StepOutput(self._graphs.run(batch))
        return super().step(batch)

    def _logits_of(self, step: DeviceStep) -> Array:
        return self.run(step).logits

    def close(self) -> None:
        """See `Runtime.close`."""
        if self._graphs is not None:
            self._graphs.drop()
        super().close()
        if self._stream is not None:
            self._stream.release_memory()
