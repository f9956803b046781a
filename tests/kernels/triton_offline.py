"""What `test_triton_compile` asks of Triton as a compiler, in a process of its own: the tests' own process interprets.

``python -m tests.kernels.triton_offline CAPABILITY`` prints JSON.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from pocketllm.kernels.jit.loading_triton import choose_compiler
from pocketllm.kernels.jit.report_triton import DTYPES, distinct, launches_of, ops, timed_launches
from pocketllm.kernels.jit.toolchain_triton import Launch, cuda_target, recorded_launches, table_row
from pocketllm.kernels.registry import spec
from pocketllm.models.family import ModelConfig, family, model_types
from pocketllm.runtimes.arrays import Host
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.torch_arrays import TorchArrays
from pocketllm.runtimes.triton_runtime import TritonRuntime
from tests.forward import chunk_batch

# Two layers show every kernel; the sizes are those of models that people run.
LARGE: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
        },
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
        },
    ],
    "qwen2": [
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
        }
    ],
    "qwen3": [
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        }
    ],
}


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and a ``config.json`` of each tiny model and each large one."""
    for name in model_types():
        tiny = family(name).tiny_config()
        yield f"{name} tiny", tiny
        for changes in LARGE.get(name, []):
            yield f"{name} {changes['hidden_size']}", tiny | changes | {"num_hidden_layers": 2}


class ShapesOnly(TorchArrays):
    """Arrays without contents; what comes back from them is zero."""

    def to_host(self, array: torch.Tensor) -> Host:
        return np.zeros(tuple(array.shape), dtype=str(array.dtype).removeprefix("torch."))


class ShapesRuntime(TritonRuntime):
    """Runs on shapes; no kernel is needed to put logits in order, and doing so would take their numbers."""

    def __init__(self, config: ModelConfig, options: RuntimeOptions) -> None:
        super().__init__(config, options)
        self._score = self._ops.bind("score", k=0)

    def make_arrays(self, options: RuntimeOptions) -> TorchArrays:
        return ShapesOnly(options.device, options.dtype)


def model_launches(raw: dict[str, Any], dtype: str, target: GPUTarget) -> tuple[list[Launch], list[Launch]]:
    """What a model launches while it is loaded, and in steps of many kinds; its arrays have shapes and no contents."""
    module = family(raw["model_type"])
    config = module.parse_config("hf", raw)
    runtime = ShapesRuntime(config, RuntimeOptions(device="meta", dtype=dtype, block_size=16))
    weights = {
        weight.name: torch.empty(
            weight.shape, dtype=getattr(torch, dtype if len(weight.shape) == 2 else "float32"), device="meta"
        )
        for weight in module.weights(config, "hf")
        if not weight.optional
    }
    runtime.build(weights)
    with recorded_launches(target) as early:
        runtime.compile_kernels(lambda *_: None)
    runtime.allocate(4096, 8)
    with recorded_launches(target) as late:
        for sequences, tokens, past in itertools.product((1, 2), (1, 17, 513), (0, 600)):
            if past + tokens <= config.context_length:
                blocks = list(range(-(-(past + tokens) // 16)))
                logits = runtime.forward(chunk_batch([(range(tokens), past, blocks)] * sequences)).logits
                runtime.take_rows(logits, np.arange(sequences, dtype=np.int32))
                runtime.score(logits, np.zeros(len(logits), np.int32), 0)
    return early, late


def unused_kernels(launches: list[Launch]) -> list[str]:
    """Functions of the implementations that no launch reaches, directly or from another function."""
    launched = {launch.name for launch in launches}
    unused = []
    for op in ops():
        module = importlib.import_module(f"pocketllm.kernels.{op}.impl_triton")
        source = inspect.getsource(module)
        functions = [value for value in vars(module).values() if isinstance(value, JITFunction)]
        for function in functions:
            own = function.__module__ == module.__name__
            if own and f"{op}:{function.__name__}" not in launched and source.count(f"{function.__name__}(") < 2:
                unused.append(f"{op}:{function.__name__}")
    return unused


def main(capability: int) -> None:
    choose_compiler()
    target = cuda_target(capability)
    of_ops = [launch for op in ops() for launch in timed_launches(op, target)]
    odd = []
    for op in ops():
        for end in (0, 1):
            dims = {name: max(ends[end], 1) for name, ends in spec(op).dims.items()}
            odd += launches_of(spec(op), dims, "bfloat16", target)
    of_models, late = [], []
    for name, raw in configurations():
        for dtype in DTYPES:
            early, steps = model_launches(raw, dtype, target)
            of_models += early
            known = {launch.key for launch in early}
            late += [f"{name}, {dtype}: {launch.key}" for launch in distinct(steps) if launch.key not in known]
    launches = distinct(of_ops + of_models)
    report = {
        "rows": [table_row(launch, target) for launch in launches],
        "odd sizes": [table_row(launch, target) for launch in distinct(odd)],
        "late": late,
        "unused": unused_kernels(of_ops + odd),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
