"""The CUDA C runtime: what it runs on, quantised weights, and decode steps as graphs.

Its tokens and bits: `test_gpu_runtimes`.
"""

from __future__ import annotations

import shutil
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pocketllm.kernels.checking.arrays import backend
from pocketllm.kernels.jit import toolchain_cupy
from pocketllm.kernels.jit.builds import QUEUE
from pocketllm.kernels.jit.toolchain_cupy import Kernel
from pocketllm.models.family import family
from pocketllm.runtimes.base import Batch, RuntimeOptions
from pocketllm.runtimes.cupy_arrays import CupyArrays
from pocketllm.runtimes.cupy_runtime import CupyRuntime
from pocketllm.runtimes.decode_graphs import MOST_GRAPHS, DecodeGraphs, is_decode
from pocketllm.runtimes.op_runtime import DeviceStep
from pocketllm.runtimes.registry import select_backend
from tests.forward import all_logits, as_numpy, chunk_batch, load_runtime
from tests.models.test_against_transformers import save_tiny
from tests.models.test_gguf_models import write_gguf
from tests.runtimes.test_torch_runtime import rows_for

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
    for name in ("xpu", "cuda:", "cuda:x", "cudax", "cuda:-1", "cuda:1234"):
        (reason,) = CupyRuntime.supports(tiny_llama(), replace(CPU, device=name))
        assert reason.startswith(f"device {name}: there is no device {name!r} for CUDA C: name one such as cuda:0")
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
        self.captured = self.queued = self.released = 0
        self.full = False

    def release_graph_memory(self) -> None:
        self.released += 1

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.full:
            raise MemoryError
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
    graphs = DecodeGraphs(graphed.device_step, lambda step: graphed.run(step).logits, captures)
    blocks = [[3, 0], [1, 7], [5, 2]]
    prompts = [([4] * 14, 0, own) for own in blocks]
    for runtime in (plain, graphed):
        runtime.forward(chunk_batch(prompts))
    random = np.random.default_rng(5)
    for past in range(14, 20):  # over the end of a block
        step = decode(random.integers(0, 320, size=3).tolist(), past, [own[: past // 16 + 1] for own in blocks])
        expected = as_numpy(plain.forward(step).logits)
        np.testing.assert_array_equal(as_numpy(graphs.run(step)), expected)
    assert (captures.captured, captures.queued) == (2, 6)


def counting_graphs(captures: Captures) -> DecodeGraphs:
    """Graphs of a model whose logits are the context's lengths."""

    def device_step(batch: Batch) -> DeviceStep:
        names = ("token_ids", "positions", "query_start", "context_len", "block_table", "output_rows")
        arrays = {name: getattr(batch, name).copy() for name in names}
        others = {"rope_lengths": batch.rope_length.copy(), "slots": batch.positions.copy()}
        states = {"state_slots": batch.state_slot.copy(), "save_slots": batch.save_slot.copy()}
        return DeviceStep(**arrays, **others, **states, hidden_rows=None, hidden=None)

    return DecodeGraphs(device_step, lambda step: step.context_len.copy(), captures)


def test_graphs_are_as_many_as_they_may_be_and_gone_when_dropped() -> None:
    captures = Captures()
    graphs = counting_graphs(captures)
    for count in (*range(1, MOST_GRAPHS + 2), MOST_GRAPHS + 1, 1):
        graphs.run(decode([1] * count, 3, [[0]] * count))
    assert captures.captured == MOST_GRAPHS + 2  # the first was dropped for the last, and made anew
    assert captures.released == 0
    graphs.drop()
    assert captures.released == 1
    graphs.run(decode([1], 3, [[0]]))
    assert captures.captured == MOST_GRAPHS + 3


def test_without_memory_for_a_graph_all_are_dropped_and_the_step_runs_by_itself() -> None:
    captures = Captures()
    graphs = counting_graphs(captures)
    one, two = decode([1], 3, [[0]]), decode([1, 2], 6, [[0], [1]])
    graphs.run(one)
    captures.full = True
    np.testing.assert_array_equal(graphs.run(two), [7, 7])
    assert captures.released == 1
    captures.full = False
    np.testing.assert_array_equal(graphs.run(one), [4])
    assert captures.captured == 2  # the first graph was not kept


def test_a_capture_lets_go_of_the_first_runs_logits_before_the_second() -> None:
    alive: list[weakref.ref[Any]] = []

    def forward(step: DeviceStep) -> Any:
        assert all(logits() is None for logits in alive)
        logits = np.zeros(1)
        alive.append(weakref.ref(logits))
        return logits

    graphs = counting_graphs(Captures())
    graphs._forward = forward
    graphs.run(decode([1], 3, [[0]]))
    assert len(alive) == 3  # twice while it was captured, and when it was queued


class Memory:
    """A device's stream as far as `close` sees it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __enter__(self) -> None:
        self.told.append("enter")

    def __exit__(self, *raised: object) -> None:
        self.told.append("exit")

    def drop(self) -> None:
        self.told.append("graphs")

    def release_memory(self) -> None:
        self.told.append("memory")


def test_closing_gives_back_graphs_and_what_the_pools_keep() -> None:
    runtime: Any = CupyRuntime(tiny_llama(), CPU)
    runtime.allocate(2, 0)
    memory = Memory()
    runtime._stream = runtime._graphs = memory
    runtime.close()
    assert memory.told == ["graphs", "enter", "exit", "memory"]


class CopiedOnly(np.ndarray[Any, Any]):
    """An array with what CuPy does by copying and clearing memory, without a kernel of its own that it would compile.

    See `_scatter_op` in CuPy's ``_routines_indexing.pyx`` for when an assignment is a copy.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
        raise AssertionError(f"CuPy would compile {ufunc.__name__}")

    def __array_function__(self, function: Any, *given: Any) -> Any:
        raise AssertionError(f"CuPy would compile {function.__name__}")

    def __getitem__(self, index: Any) -> Any:
        for part in index if isinstance(index, tuple) else (index,):
            assert part is None or part is Ellipsis or isinstance(part, int | slice), "CuPy would compile a selection"
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        assert isinstance(value, CopiedOnly), "CuPy would compile a fill"
        assert (target.shape, target.strides, target.dtype) == (value.shape, value.strides, value.dtype)
        assert target.flags.c_contiguous
        super().__setitem__(index, value)

    def get(self) -> Any:
        assert self.flags.c_contiguous
        return np.array(self.view(np.ndarray))

    def copy(self, order: Any = "C") -> Any:
        assert self.flags.c_contiguous
        return super().copy(order)

    def _compiled(self, *given: Any, **named: Any) -> Any:
        raise AssertionError("CuPy would compile this")

    astype = fill = repeat = take = sum = _compiled


def moved(array: Any, dtype: Any = None) -> CopiedOnly:
    assert not isinstance(array, CopiedOnly)
    return np.array(array, dtype, order="C").view(CopiedOnly)


COPYING = types.SimpleNamespace(
    ndarray=CopiedOnly,
    array=moved,
    asarray=moved,
    empty=lambda shape, dtype: np.empty(shape, dtype).view(CopiedOnly),
    zeros=lambda shape, dtype: np.zeros(shape, dtype).view(CopiedOnly),
    empty_like=lambda array: np.empty(array.shape, array.dtype).view(CopiedOnly),
)


def everything(runtime: Any) -> list[Any]:
    """What a runtime gives for whatever the engine may call."""
    output = runtime.forward(chunk_batch([([3, 1, 4], 0, [0]), ([1, 5], 0, [1])]))
    results = [runtime._arrays.to_host(output.logits)]
    results.append(runtime.sample(runtime.take_rows(output.logits, np.array([1, 0], np.int32)), rows_for(2)))
    results.append(runtime.score(output.logits, np.zeros(5, np.int32), 3).top_logits)
    graphs = DecodeGraphs(runtime.device_step, lambda step: runtime.run(step).logits, Captures())
    for past in (3, 4):
        results.append(runtime._arrays.to_host(graphs.run(decode([2, 7], past, [[0, 2, 3], [1]]))))
    runtime.copy_blocks([0, 1], [5, 0])
    runtime.copy_states([0], [3])
    blocks, states = runtime.export_blocks([5, 0]), runtime.export_states([3])
    runtime.import_blocks([1, 2], blocks)
    runtime.import_states([0], states)
    results += [np.frombuffer(data, np.uint8) for data in (blocks, states, runtime.export_blocks([1, 2]))]
    return results


@pytest.mark.skipif(DEVICE != "cpu", reason="arrays are CuPy's own")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_5", "llama"])
def test_nothing_is_asked_of_arrays_that_cupy_would_compile(
    model_type: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(model_type, {}, tmp_path)
    expected = everything(load_runtime(tmp_path, backend="cupy", dtype=dtype))
    monkeypatch.setattr(toolchain_cupy, "np", COPYING)
    monkeypatch.setattr(CupyArrays, "to_host", lambda self, array: array.get())
    found = everything(load_runtime(tmp_path, backend="cupy", dtype=dtype))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
