"""What every runtime over ops promises its device: whatever the engine calls runs within the runtime's context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.models.family import family
from pocketllm.runtimes.base import Runtime, RuntimeOptions
from pocketllm.runtimes.op_runtime import OpRuntime
from pocketllm.runtimes.registry import BACKENDS
from tests.forward import chunk_batch
from tests.models.test_against_transformers import save_tiny
from tests.runtimes.test_torch_runtime import rows_for

PROMPT = [([3, 1, 4, 1, 5], 0, [0])]


class Device:
    """How often its context was entered, and whether it is entered now."""

    def __init__(self) -> None:
        self.entered = 0
        self.inside = False

    @contextlib.contextmanager
    def __call__(self, own: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        assert not self.inside
        self.entered += 1
        self.inside = True
        with own:
            yield
        self.inside = False


class Watched:
    """An array library that is used within the device's context only."""

    def __init__(self, arrays: Any, device: Device) -> None:
        self._arrays = arrays
        self._device = device

    def __getattr__(self, name: str) -> Any:
        assert name == "itemsize" or self._device.inside, f"{name} outside of the device's context"
        return getattr(self._arrays, name)


@pytest.fixture(params=["torch", "numba", "cupy"])
def watched(request: pytest.FixtureRequest) -> tuple[type[OpRuntime], Device]:
    device = Device()

    class WatchedRuntime(BACKENDS[request.param].load()):  # type: ignore[misc]
        def device_context(self) -> Any:
            return device(super().device_context())

        def make_arrays(self, options: RuntimeOptions) -> Any:
            return Watched(super().make_arrays(options), device)

    return WatchedRuntime, device


def test_every_call_of_the_engine_runs_within_the_context(
    watched: tuple[type[OpRuntime], Device], tmp_path: Path
) -> None:
    runtime_class, device = watched
    save_tiny("qwen3_5", {}, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        runtime = runtime_class(config, RuntimeOptions(device="cpu", dtype="float32", block_size=16))
        one = np.zeros(1, np.int32)
        results: dict[str, Any] = {}

        weights: set[int] = set()

        def progress(what: str, done: int, total: int) -> None:
            assert not device.inside, "between two weights another model may compute"
            if what == "weights":
                weights.add(done)

        def state_moves() -> None:
            runtime.import_states([1], results["export_states"])

        calls: dict[str, Callable[[], Any]] = {
            "load": lambda: runtime.load(checkpoint, progress),
            "allocate": lambda: runtime.allocate(4, 4),
            "forward": lambda: runtime.forward(chunk_batch(PROMPT)),
            "take_rows": lambda: runtime.take_rows(results["forward"].logits, one),
            "sample": lambda: runtime.sample(results["take_rows"], rows_for(1)),
            "score": lambda: runtime.score(results["take_rows"], one, 2),
            "copy_blocks": lambda: runtime.copy_blocks([0], [1]),
            "copy_states": lambda: runtime.copy_states([0], [2]),
            "export_blocks": lambda: runtime.export_blocks([0, 1]),
            "import_blocks": lambda: runtime.import_blocks([2, 3], results["export_blocks"]),
            "export_states": lambda: runtime.export_states([0]),
            "import_states": state_moves,
            "close": runtime.close,
        }
        assert calls.keys() == Runtime.__abstractmethods__ - {"__init__", "supports", "numerics_id"}
        for name, call in calls.items():
            device.entered = 0
            results[name] = call()
            # Loading enters it for each weight and for binding; progress tells of one more, the end.
            times = len(weights) if name == "load" else 1
            assert device.entered == times > 0, f"{name} enters the context {device.entered} times, not {times}"


def test_rows_go_where_they_are_told(tmp_path: Path) -> None:
    """Copies read everything before they write, so that sources may be targets too."""
    save_tiny("qwen3_5", {}, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        options = RuntimeOptions(device="cpu", dtype="float32", block_size=16)
        for backend in ("torch", "numba", "cupy"):
            runtime = BACKENDS[backend].load()(config, replace(options))
            runtime.load(checkpoint, lambda *_: None)
            runtime.allocate(3, 3)
            for exported, imported, copy, size in (
                (runtime.export_blocks, runtime.import_blocks, runtime.copy_blocks, runtime.bytes_per_block),
                (runtime.export_states, runtime.import_states, runtime.copy_states, runtime.bytes_per_state),
            ):
                words = np.random.default_rng(0).standard_normal(3 * size // 4).astype(np.float32)
                imported([0, 1, 2], words.tobytes())
                before = [exported([row]) for row in range(3)]
                copy([0, 1], [1, 2])
                assert [exported([row]) for row in range(3)] == [before[0], before[0], before[1]]
            runtime.close()
