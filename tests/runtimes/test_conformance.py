"""Every runtime keeps its contract through a random walk, and broken ones are found out; see `conformance`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pocketllm.runtimes.registry import BACKENDS
from tests.forward import as_numpy
from tests.runtimes.conformance.faults import FAULTS, STEPS, Fault
from tests.runtimes.conformance.memory import POISON, Pool
from tests.runtimes.conformance.models import SMALL, load, save_model, scale_for
from tests.runtimes.conformance.serial import Serial
from tests.runtimes.conformance.walk import Instance, Walk

FAMILIES = ("llama", "qwen3_5")
WALKED = 2000
SHARDS = 4
"""Walks that a backend's steps are divided into, so that test processes can share them."""

GOLDEN_TOLERANCE = 1e-3


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Arrays this small gain nothing from more, and waiting for a busy core costs a hundredfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "numba"])
def test_a_walk_holds(backend: str, model_type: str, shard: int, tmp_path: Path) -> None:
    scale = scale_for(backend)
    folder = save_model(model_type, scale, tmp_path)
    walk = Walk(instances=[Instance(backend)], folder=folder, scale=scale, seed=shard)
    counts = walk.take(range(WALKED // SHARDS))
    assert counts["steps"] == WALKED // SHARDS
    seldom = {"fork", "restart", "import", "snapshot", "draft rows rejected", "rows of hidden compared"}
    assert all(counts[event] for event in seldom), counts


def test_a_walk_holds_for_numba_at_1_2_3_and_7_threads(tmp_path: Path) -> None:
    """Its pool of threads is made when the process starts, and one process compiles for all walks."""
    options = [
        "--backend",
        "numba",
        "--family",
        *FAMILIES,
        "qwen3",
        "--steps",
        str(WALKED),
        "--threads",
        "1",
        "2",
        "3",
        "7",
    ]
    _run_alone(tmp_path, options, NUMBA_NUM_THREADS="7")


def test_a_walk_holds_for_windowed_layers(tmp_path: Path) -> None:
    walk = Walk(instances=[Instance("torch")], folder=save_model("qwen3", SMALL, tmp_path), scale=SMALL)
    walk.take(range(WALKED))


def _run_alone(tmp_path: Path, options: list[str], **environment: str) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.runtimes.conformance", *options]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_serial_runs_are_those_of_the_reference(backend: str, model_type: str, tmp_path: Path) -> None:
    """Walks compare a runtime with itself; this says that it computes the model."""
    folder = save_model(model_type, SMALL, tmp_path)
    path = tuple(range(SMALL.longest))
    found = Serial(load(backend, folder), SMALL.longest).rows(path, SMALL.longest * 3)
    expected = Serial(load("torch", folder), SMALL.longest).rows(path, SMALL.longest * 3)
    for own, reference in zip(found, expected, strict=True):
        assert abs(own - reference).max() <= GOLDEN_TOLERANCE


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    assert fault.walk(tmp_path).failure(range(STEPS)) is not None


@pytest.mark.parametrize(
    ("model_type", "backends"), [("llama", ("numba", "torch")), ("qwen3_5", ("torch",))], ids=["llama", "qwen3_5"]
)
def test_without_a_fault_the_same_walks_hold(model_type: str, backends: tuple[str, ...], tmp_path: Path) -> None:
    assert Fault("none", {}, model_type, backends).walk(tmp_path).failure(range(STEPS)) is None


def test_a_failing_walk_is_made_short_and_replayed(tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "a block is shared after a write")
    walk = fault.walk(tmp_path)
    failure = walk.failure(range(STEPS))
    assert failure is not None
    fewer = walk.shortened(range(failure.step + 1))
    assert 1 < len(fewer) < failure.step / 2
    assert walk.failure(fewer) is not None
    assert all(walk.failure([step for step in fewer if step != gone]) is None for gone in fewer)


def test_memory_that_nobody_owns_holds_nan_and_is_looked_at(tmp_path: Path) -> None:
    runtime = load("torch", save_model("qwen3_5", SMALL, tmp_path))
    runtime.allocate(3, 2)
    pool = Pool(3, runtime.bytes_per_block, runtime.export_blocks, runtime.import_blocks)
    assert pool.written_unowned() == []
    runtime.import_blocks([1], bytes(runtime.bytes_per_block))
    assert pool.written_unowned() == [1]
    runtime.import_blocks([1], POISON * runtime.bytes_per_block)
    assert pool.written_unowned() == []
    serial = Serial(runtime, SMALL.longest)
    assert as_numpy(serial.rows((1, 2, 3), SMALL.longest)[0]).shape == (3, SMALL.sizes["vocab_size"])
    serial.close()
