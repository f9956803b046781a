"""What is asked of CuPy and CUDA, in what order: kernels and streams on a GPU, seen through a CuPy that takes notes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.jit import loading_cupy, toolchain_cupy
from pocketllm.kernels.jit.cuda_emulator.compiler import shutil
from pocketllm.kernels.jit.cuda_source import KernelSource, array, readonly, scalar
from pocketllm.kernels.jit.loading_cupy import DeviceKernel, DeviceStream
from pocketllm.kernels.jit.toolchain_cupy import Kernel

OWN_SHARED = 1000
"""Bytes of shared memory that the kernel's own variables take."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int) -> None:
        super().__init__(f"{size} beyond {total}")


class NotedArray:
    """An array as far as a launch sees it."""

    def __init__(self, address: int, dtype: str = "float32", device: int = 0) -> None:
        self.data = SimpleNamespace(ptr=address, device_id=device)
        self.dtype = np.dtype(dtype)
        self.flags = SimpleNamespace(c_contiguous=True)


class NotedCupy:
    """CuPy with devices of these compute capabilities; what it is told lies in `notes`."""

    ndarray = NotedArray

    def __init__(self, capabilities: tuple[int, ...] = (90, 70)) -> None:
        self.notes: list[Any] = []
        self.fails: int | None = None
        note = self.notes.append

        def device(index: int) -> Any:
            found = self.entered(f"device {index}")
            found.compute_capability = f"{capabilities[index]}"
            found.use = lambda: note(("use", index))
            return found

        def memory(size: int) -> Any:
            if self.fails is not None:
                raise CUDARuntimeError(self.fails)
            return size

        class Module:
            def load(self, cubin: bytes) -> None:
                note(("load", cubin))

            def get_function(self, symbol: str) -> Any:
                note(("function", symbol))
                return Function()

        class Function:
            ptr = 77

            def __call__(self, grid: Any, block: Any, values: Any, shared_mem: int) -> None:
                note(("launch", grid, block, values, shared_mem))

        class MemoryPool:
            def __init__(self, allocate: Any) -> None:
                self.malloc = allocate

            def total_bytes(self) -> int:
                return 12

            def free_all_blocks(self) -> None:
                note("free graphs")

        self.driver = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcGetAttribute=lambda attribute, function: {(1, 77): OWN_SHARED}[attribute, function],
            funcSetAttribute=lambda *given: note(("attribute", *given)),
        )
        self.cuda = SimpleNamespace(
            Device=device,
            Stream=lambda non_blocking: self.stream(),
            MemoryPool=MemoryPool,
            Memory=memory,
            MemoryPointer=lambda memory, offset: (memory, offset),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: memory(len(capabilities))
            ),
            driver=self.driver,
            function=SimpleNamespace(Module=Module),
            using_allocator=self.using,
        )

    def entered(self, name: str) -> Any:
        notes = self.notes

        class Context(SimpleNamespace):
            def __enter__(self) -> None:
                notes.append(f"enter {name}")

            def __exit__(self, *raised: object) -> None:
                notes.append(f"exit {name}")

        return Context()

    def stream(self) -> Any:
        stream = self.entered("stream")
        stream.begin_capture = lambda: self.notes.append("begin")
        stream.synchronize = lambda: self.notes.append("wait")
        graph = SimpleNamespace(launch=lambda on: self.notes.append(("queue", on is stream)))
        stream.end_capture = lambda: self.notes.append("end") or graph
        return stream

    @contextmanager
    def using(self, allocate: Any) -> Iterator[None]:
        self.allocate = allocate
        self.notes.append("graph memory")
        try:
            yield
        finally:
            self.notes.append("own memory")

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: self.notes.append("free arrays"))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedCupy:
    cupy = NotedCupy()
    monkeypatch.setattr(loading_cupy, "cupy", lambda: cupy)
    return cupy


SOURCE = KernelSource(
    Path("op/kernel.cu"),
    "kernel",
    {
        "x": readonly("float32"),
        "bias": readonly("bfloat16", optional=True),
        "out": array("int8"),
        "n": scalar("int32"),
        "size": scalar("int64"),
        "scale": scalar("float32"),
        "factor": scalar("float64"),
        "seen": scalar("bool"),
    },
)


def launched(noted: NotedCupy, kernel: DeviceKernel, shared: int = 0, bias: Any = None) -> Any:
    """What CUDA is told of a launch."""
    noted.notes.clear()
    arguments = NotedArray(2**63 + 8), bias, NotedArray(16), 3, 4, 5, 6, True
    kernel.launch([7, 1, 1], [32, 1, 1], shared, arguments)
    return noted.notes


def test_arguments_are_passed_in_their_declared_types(noted: NotedCupy) -> None:
    kernel = DeviceKernel(SOURCE, b"code", "symbol", 1)
    assert noted.notes == ["enter device 1", ("load", b"code"), ("function", "symbol"), "exit device 1"]
    before, (_, grid, block, values, shared), after = launched(noted, kernel)
    assert (before, after) == ("enter device 1", "exit device 1")
    assert (grid, block, shared) == ((7, 1, 1), (32, 1, 1), 0)
    assert values == (2**63 + 8, 0, 16, 3, 4, 5, 6, True)
    types = np.uint64, np.uint64, np.uint64, np.int32, np.int64, np.float32, np.float64, np.bool_
    assert [type(value) for value in values] == list(types)
    assert launched(noted, kernel, bias=NotedArray(24))[1][3][1] == np.uint64(24)


def test_shared_memory_is_allowed_once_beyond_what_any_launch_has(noted: NotedCupy) -> None:
    """48 KiB, of which the kernel's own variables are a part."""
    kernel, free = DeviceKernel(SOURCE, b"code", "symbol", 0), (48 << 10) - OWN_SHARED

    def allowed(shared: int) -> list[Any]:
        return [note for note in launched(noted, kernel, shared) if note[0] == "attribute"]

    assert allowed(free) == []
    assert allowed(free + 1) == [("attribute", 77, 8, free + 1)]
    assert allowed(free + 1) == allowed(100) == []
    assert allowed(60_000) == [("attribute", 77, 8, 60_000)]


def test_a_stream_is_entered_on_its_device_and_left_before_it(noted: NotedCupy) -> None:
    stream = DeviceStream(1)
    noted.notes.clear()
    with stream:
        noted.notes.append("work")
    assert noted.notes == ["enter device 1", "enter stream", "work", "exit stream", "exit device 1"]


def test_work_is_run_then_recorded_in_memory_of_its_own(noted: NotedCupy) -> None:
    stream = DeviceStream(0)
    noted.notes.clear()
    queue = stream.capture(lambda: noted.notes.append("work"))
    assert noted.notes == ["graph memory", "work", "begin", "work", "end", "own memory"]
    noted.notes.clear()
    queue()
    assert noted.notes == [("queue", True)]
    assert noted.allocate(5) == (5, 0)


@pytest.mark.parametrize("run", [1, 2])
def test_a_capture_ends_where_the_work_fails(noted: NotedCupy, run: int) -> None:
    stream = DeviceStream(0)
    noted.notes.clear()

    def work() -> None:
        noted.notes.append("work")
        if noted.notes.count("work") == run:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        stream.capture(work)
    recorded = ["begin", "work", "end"] if run == 2 else []
    assert noted.notes == ["graph memory", "work", *recorded, "own memory"]


def test_memory_that_graphs_work_on_is_not_given_back_for_want_of_more(noted: NotedCupy) -> None:
    """CuPy's pool empties itself for CUDA's error, and only for that."""
    stream = DeviceStream(0)
    stream.capture(lambda: None)
    noted.fails = 2
    with pytest.raises(OutOfMemoryError, match="8 beyond 4"):
        noted.allocate(8)
    noted.fails = 700
    with pytest.raises(CUDARuntimeError, match="700"):
        noted.allocate(8)


def test_memory_is_given_back_on_its_device(noted: NotedCupy) -> None:
    stream = DeviceStream(1)
    noted.notes.clear()
    stream.release_graph_memory()
    stream.release_memory()
    assert noted.notes == [
        *("enter device 1", "wait", "free graphs", "exit device 1"),
        *("enter device 1", "free arrays", "exit device 1"),
    ]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda", None),
        ("cuda:0", None),
        ("cuda:1", "cuda:1 has compute capability 7.0, and the kernels need 7.5"),
        ("cuda:2", "CUDA finds 2 devices, which are counted from 0"),
        ("cuda:", "there is no device 'cuda:' for CUDA C: name one such as cuda:0, or cpu to emulate it"),
    ],
)
def test_devices_are_taken_or_refused(noted: NotedCupy, device: str, reason: str | None) -> None:
    assert toolchain_cupy.obstacle(device) == reason


def test_a_driver_without_devices_is_told(noted: NotedCupy) -> None:
    noted.fails = 100
    assert toolchain_cupy.obstacle("cuda") == "CUDA finds no device (status 100)"


def test_without_cupy_there_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(loading_cupy.importlib, "import_module", missing)
    reason = "which cannot be imported \\(No module named 'cupy'\\): install pocketllm\\[cuda\\]"
    with pytest.raises(UnsupportedFeatureError, match=reason):
        loading_cupy.compile_cubin(SOURCE, "sm_90")
    assert "install pocketllm[cuda]" in (toolchain_cupy.obstacle("cuda:0") or "")


def test_without_its_library_the_compiler_is_said_to_be_missing(noted: NotedCupy) -> None:
    def missing() -> Any:
        raise RuntimeError("no libnvrtc.so")

    noted.cuda.nvrtc = SimpleNamespace(getVersion=missing)
    with pytest.raises(
        UnsupportedFeatureError, match=r"CuPy cannot load \(no libnvrtc.so\): install pocketllm\[cuda\]"
    ):
        loading_cupy.compile_cubin(SOURCE, "sm_90")


def test_a_kernel_takes_arrays_of_its_own_device_only(noted: NotedCupy) -> None:
    parameter = readonly("float32")
    assert parameter.complaint(NotedArray(8, device=1), NotedArray, 1) is None
    complaint = parameter.complaint(NotedArray(8, device=1), NotedArray, 0)
    assert complaint == "it lies on device 1, and the kernel runs on device 0"
    kernel = Kernel("cuda", "kernel.cu", "kernel", x=parameter)
    with pytest.raises(TypeError, match="argument x: it lies on device 1"):
        kernel([1], [32], NotedArray(8, device=1))


def test_a_device_without_a_number_is_no_kernels() -> None:
    with pytest.raises(ConfigurationError, match="there is no device 'cuda:x'"):
        Kernel("cuda:x", "kernel.cu", "kernel", x=array("float32"))


def test_the_checking_adapter_works_on_its_device(noted: NotedCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = importlib.import_module("pocketllm.kernels.checking.arrays_cupy")
    noted.array = lambda given: noted.notes.append("copy") or given  # type: ignore[attr-defined]
    monkeypatch.setattr(adapters, "obstacle", lambda device: None)
    adapters.Adapter("cuda:1").put(np.zeros(3), "float32")
    assert noted.notes == [("use", 1), "copy"]


def test_kernels_are_reported_on_without_a_compiler_for_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    report = importlib.import_module("pocketllm.kernels.jit.report_cupy")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert {source.path.parent.name for source in report.timed_kernels("linear")} == {"linear"}
