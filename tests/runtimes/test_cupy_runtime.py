"""The CUDA C runtime: what it runs on, quantised weights, and decode steps as graphs.

Its tokens and bits: `test_gpu_runtimes`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from pocketllm.kernels.checking.arrays import backend
from pocketllm.kernels.jit.builds import QUEUE
from pocketllm.kernels.jit.toolchain_cupy import Kernel
from pocketllm.models.family import family
from pocketllm.runtimes.base import Batch, RuntimeOptions
from pocketllm.runtimes.cupy_runtime import CupyRuntime
from pocketllm.runtimes.decode_graphs import MOST_GRAPHS, DecodeGraphs, is_decode
from pocketllm.runtimes.op_runtime import DeviceStep
from pocketllm.runtimes.registry import select_backend
from tests.forward import all_logits, as_numpy, chunk_batch, load_runtime
from tests.models.test_against_transformers import save_tiny
from tests.models.test_gguf_models import write_gguf

DEVICE = backend("cupy").device
CPU = RuntimeOptions(device="cpu", dtype="float32", block_size=16)


def tiny_llama():  # type: ignore[no-untyped-def]
    return family("llama").parse_config("hf", family("llama").tiny_config())


def loaded(path: Path) -> CupyRuntime:
    runtime = load_runtime(path, backend="cupy", device=DEVICE)
    assert isinstance(runtime, CupyRuntime)
    return runtime


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (reason,) = CupyRuntime.supports(tiny_llama(), CPU)
    assert "g++" in reason


def test_devices_that_are_not_there_are_refused_by_name() -> None:
    (reason,) = CupyRuntime.supports(tiny_llama(), replace(CPU, device="xpu"))
    assert "device xpu" in reason
    if DEVICE == "cpu":
        (reason,) = CupyRuntime.supports(tiny_llama(), replace(CPU, device="cuda:0"))
        assert "device cuda:0" in reason


def test_on_a_cpu_it_is_chosen_by_name_only() -> None:
    assert select_backend("cupy", tiny_llama(), CPU).backend.name == "cupy"
    assert select_backend("auto", tiny_llama(), CPU).backend.name == "numba"


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_quantised_weights_give_what_numba_makes_of_them(format: str, tmp_path: Path) -> None:
    """Both round activations to int8 in the same blocks, so that float32 sums are all that differs."""
    model = save_tiny("llama", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}, tmp_path / "hf")
    path = tmp_path / "model.gguf"
    write_gguf(model, path, matrices=gguf.GGMLQuantizationType[format])
    tokens = np.random.default_rng(3).integers(0, 320, size=12).tolist()
    expected = all_logits(load_runtime(path, backend="numba"), tokens)
    found = all_logits(loaded(path), tokens)
    # An activation next to the middle between two codes may round either way: a step of one code in one product.
    step = 0.0 if format == "F16" else np.abs(expected).max() / 127
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 + step)
    assert np.median(np.abs(found - expected)) < 1e-4


def test_nothing_is_compiled_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen2", {"num_hidden_layers": 1}, tmp_path)
    runtime = loaded(tmp_path)
    monkeypatch.setattr(Kernel, "build", lambda self: pytest.fail(f"{self.name} is built after loading"))
    for length in (1, 17, 130):
        output = runtime.forward(chunk_batch([([7] * length, 0, list(range(-(-length // 16))))]))
        runtime.score(output.logits, np.zeros(length, dtype=np.int32), 5)
    output = runtime.forward(chunk_batch([([1], 0, [0]), ([2, 3], 0, [1])]))
    runtime.take_rows(output.logits, np.array([1], dtype=np.int32))
    assert QUEUE.build_all(lambda *_: None).compiled == 0


def decode(tokens: list[int], past: int, blocks: list[list[int]]) -> Batch:
    return chunk_batch([([token], past, own) for token, own in zip(tokens, blocks, strict=True)])


def test_decode_steps_are_told_from_others() -> None:
    step = decode([1, 2], 5, [[0], [1]])
    assert is_decode(step)
    rows = np.zeros(1, np.int32)
    for other in (
        chunk_batch([([1, 2], 0, [0])]),
        replace(step, output_rows=np.array([1, 0], np.int32)),
        replace(step, output_rows=rows),
        replace(step, hidden_rows=rows),
        replace(step, hidden=object()),
    ):
        assert not is_decode(other)


class Captures:
    """A device's capture as far as the host sees it: the work runs twice, and then whenever its graph is queued."""

    def __init__(self) -> None:
        self.captured = self.queued = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        work()
        self.captured += 1

        def queue() -> None:
            self.queued += 1
            work()

        return queue


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
def test_decode_graphs_give_the_logits_of_steps(model_type: str, tmp_path: Path) -> None:
    """Every step with other tokens, positions, blocks and slots than the captured one."""
    save_tiny(model_type, {}, tmp_path)
    plain, graphed = loaded(tmp_path), loaded(tmp_path)
    captures = Captures()
    graphs = DecodeGraphs(lambda step: graphed.run(step).logits, captures)
    blocks = [[3, 0], [1, 7], [5, 2]]
    prompts = [([4] * 14, 0, own) for own in blocks]
    for runtime in (plain, graphed):
        runtime.forward(chunk_batch(prompts))
    random = np.random.default_rng(5)
    for past in range(14, 20):  # over the end of a block
        step = decode(random.integers(0, 320, size=3).tolist(), past, [own[: past // 16 + 1] for own in blocks])
        expected = as_numpy(plain.forward(step).logits)
        np.testing.assert_array_equal(as_numpy(graphs.run(graphed.device_step(step))), expected)
    assert (captures.captured, captures.queued) == (2, 6)


def test_graphs_are_as_many_as_they_may_be_and_gone_when_dropped() -> None:
    captures = Captures()
    graphs = DecodeGraphs(lambda step: np.zeros((len(step.context_len), 4)), captures)
    fields = ("token_ids", "positions", "rope_lengths", "slots", "context_len", "state_slots", "save_slots")

    def step(count: int) -> DeviceStep:
        arrays = {name: np.zeros(count, np.int32) for name in fields}
        table = np.zeros((count, 1), np.int32)
        start = np.arange(count + 1, dtype=np.int32)
        return DeviceStep(
            **arrays, block_table=table, query_start=start, output_rows=start[:-1], hidden_rows=None, hidden=None
        )

    for count in (*range(1, MOST_GRAPHS + 2), MOST_GRAPHS + 1, 1):
        graphs.run(step(count))
    assert captures.captured == MOST_GRAPHS + 2  # the first was dropped for the last, and made anew
    graphs.drop()
    graphs.run(step(1))
    assert captures.captured == MOST_GRAPHS + 3
