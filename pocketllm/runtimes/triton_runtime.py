"""Triton's backend: compiled for an NVIDIA GPU; on a CPU, when asked for by name, through Triton's interpreter.

The interpreter runs the same kernels on NumPy, a hundred times slower than PyTorch would: it proves them, no more.

Every op has one tile configuration whatever a step holds, attention visits keys in blocks at fixed positions, and no
reduction is split between programs by the batch's shape; so a sequence's logits do not depend on what runs beside it.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import version

import numpy as np
import torch

from pocketllm.checkpoint.checkpoint import Checkpoint
from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.jit.loading_triton import choose_compiler, choose_interpreter, loaded_as, will_load_as
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.models.family import ModelConfig, WeightSpec
from pocketllm.runtimes.base import Batch, Progress, RuntimeOptions, SamplingRows
from pocketllm.runtimes.op_runtime import OpRuntime
from pocketllm.runtimes.torch_arrays import TorchArrays, expanded, torch_build

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)


class TritonRuntime(OpRuntime):
    """See `pocketllm.runtimes.base.Runtime`."""

    name = "triton"
    batch_invariant = None

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        if options.device == "cpu":
            choose_interpreter()
            logger.warning("backend triton interprets its kernels on the CPU: this proves them, and is very slow")
        else:
            choose_compiler()
        super().__init__(config, options)

    @classmethod
    def supports(cls, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
        """See `Runtime.supports`. A process has Triton as a compiler or as an interpreter, not as both."""
        device = options.device
        obstacle = _cpu_obstacle() if device == "cpu" else _cuda_obstacle(device)
        return cls.unsupported_caches(config) + (() if obstacle is None else (obstacle,))

    def make_arrays(self, options: RuntimeOptions) -> TorchArrays:
        """See `OpRuntime.make_arrays`."""
        return TorchArrays(options.device, options.dtype)

    def make_ops(self, options: RuntimeOptions) -> BackendOpTable:
        """See `OpRuntime.make_ops`."""
        return BackendOpTable("triton", device=options.device, dtype=options.dtype, overrides=options.overrides)

    def compiled_for(self) -> tuple[str, ...]:
        """See `OpRuntime.compiled_for`. Scores are put in order by PyTorch."""
        return f"triton {version('triton')} as {loaded_as()}", *torch_build(self._options.device)

    def prepare(self, spec: WeightSpec, tensor: QuantTensor) -> torch.Tensor:
        """See `OpRuntime.prepare`."""
        return expanded(spec, tensor, device=self._options.device, dtype=self._options.dtype)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """See `Runtime.load`."""
        super().load(checkpoint, progress)
        if loaded_as() == "compiler":
            self.compile_kernels(progress)

    def compile_kernels(self, progress: Progress) -> None:
        """Launch whatever a step can launch, which compiles it: no kernel depends on how much a step holds.

        Attention has one way for block tables that fit into a segment of keys and one for longer ones, and sampling
        has kernels that only some requests need.
        """
        longest = -(-self._config.context_length // self._options.block_size)
        widths = (1, longest)
        self.allocate(1, 1)
        for done, width in enumerate(widths):
            progress("kernels", done, len(widths) + 1)
            logits = self.forward(_one_token(width, self._config.context_length)).logits
        progress("kernels", len(widths), len(widths) + 1)
        self.take_rows(logits, np.zeros(1, np.int32))
        self.score(logits, np.zeros(1, np.int32), 0)
        for constrained in (False, True):
            self.sample(logits, _one_draw(self.vocab_size, constrained=constrained))
        progress("kernels", len(widths) + 1, len(widths) + 1)
        self._caches.drop()


def _cpu_obstacle() -> str | None:
    if loaded_as() != "compiler":
        return None
    return (
        "on a CPU Triton runs through its interpreter only, and this process has imported it as a compiler; "
        "start anew with TRITON_INTERPRET=1 in the environment, or load this model before whatever imports Triton"
    )


def _cuda_obstacle(device: str) -> str | None:
    if not device.startswith("cuda"):
        return f"device {device} (it runs on CUDA devices, and on cpu through Triton's interpreter)"
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return f"device {device} (PyTorch sees {torch.cuda.device_count()} CUDA devices)"
    if will_load_as() == "interpreter":
        return "this process interprets Triton's kernels; start anew without TRITON_INTERPRET in the environment"
    # From here on Triton is a compiler, whatever the environment says later.
    importlib.import_module("triton.language")
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        return f"device {device} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
    return None


def _one_token(blocks: int, rope_length: int) -> Batch:
    """A sequence of one token, whose block table has room for `blocks`."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    return Batch(
        token_ids=zero,
        positions=zero,
        query_start=np.array([0, 1], np.int32),
        context_len=one,
        block_table=np.array([[0] + [-1] * (blocks - 1)], np.int32),
        state_slot=-one,
        save_slot=zero,
        rope_length=np.array([rope_length], np.int32),
        output_rows=zero,
    )


def _one_draw(vocabulary: int, *, constrained: bool) -> SamplingRows:
    """A draw without anything, or with a penalty and a mask."""
    entries = int(constrained)
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    return SamplingRows(
        seed=np.zeros(1, np.uint64),
        position=np.zeros(1, np.int32),
        temperature=one,
        top_p=one,
        min_p=zero,
        top_k=np.zeros(1, np.int32),
        frequency_penalty=zero,
        presence_penalty=zero,
        repetition_penalty=one,
        adjust_start=np.array([0, entries], np.int32),
        adjust_ids=np.zeros(entries, np.int32),
        adjust_bias=np.zeros(entries, np.float32),
        adjust_count=np.zeros(entries, np.int32),
        adjust_seen=np.zeros(entries, np.bool_),
        allowed=np.full((1, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32) if constrained else None,
    )
