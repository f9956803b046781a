"""CUDA C kernels in the emulator: what the language promises, equal bits in any order, and the life cycle."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from pocketllm.errors import ConfigurationError
from pocketllm.kernels import registry
from pocketllm.kernels.checking.arrays import Mode, backend
from pocketllm.kernels.checking.comparison import check, rounded, run
from pocketllm.kernels.jit import toolchain_cupy
from pocketllm.kernels.jit.cuda_emulator import compiler
from pocketllm.kernels.jit.cuda_emulator.settings import Build, emulated
from pocketllm.kernels.jit.cuda_source import INCLUDE_FOLDER, Parameter, array, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel
from pocketllm.kernels.registry import BackendOpTable, spec

Array = npt.NDArray[Any]

BUILDS: tuple[Build, ...] = ("plain", "checked")


def kernel_of(folder: Path, body: str, **parameters: Parameter) -> Kernel:
    """A kernel with this body, whose parameters have their names."""
    declared = ", ".join(f"{parameter.declaration} {name}" for name, parameter in parameters.items())
    path = folder / "kernel.cu"
    includes = "".join(f'#include "{name}"\n' for name in ("numerics.cuh", "reductions.cuh", "dynamic_shared.cuh"))
    path.write_text(f"{includes}__global__ void kernel({declared}) {{{body}}}\n", encoding="utf-8")
    return Kernel("cpu", path, "kernel", **parameters)


@pytest.fixture(params=BUILDS)
def _build(request: pytest.FixtureRequest) -> Any:
    with emulated(request.param):
        yield


@pytest.mark.usefixtures("_build")
def test_grids_and_blocks_have_three_dimensions(tmp_path: Path) -> None:
    body = """
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;"""
    out = np.zeros((2 * 3 * 4, 5 * 6 * 7), np.int32)
    kernel_of(tmp_path, body, out=array("int32"))((2, 3, 4), (5, 6, 7), out)
    assert (out == np.arange(24)[:, None] * 1000 + np.arange(210)).all()


@pytest.mark.usefixtures("_build")
def test_a_barrier_hands_over_what_was_written(tmp_path: Path) -> None:
    body = """
        __shared__ int ring[96];
        for (int round = 0; round < 5; ++round) {
            ring[threadIdx.x] = out[blockIdx.x * 96 + threadIdx.x];
            __syncthreads();
            out[blockIdx.x * 96 + threadIdx.x] = ring[(threadIdx.x + 1) % 96];
            __syncthreads();
        }"""
    out = np.arange(3 * 96, dtype=np.int32).reshape(3, 96)
    expected = np.roll(out, -5, axis=1)
    kernel_of(tmp_path, body, out=array("int32"))([3], [96], out)
    assert (out == expected).all()


SHUFFLES = {
    "__shfl_sync(mask, v, 5, {width})": lambda lane, width: lane // width * width + 5 % width,
    "__shfl_sync(mask, v, -1 - static_cast<int>(threadIdx.x % 32), {width})": lambda lane, width: (
        lane // width * width + (-1 - lane) % width
    ),
    "__shfl_sync(mask, v, threadIdx.x + 3, {width})": lambda lane, width: lane // width * width + (lane + 3) % width,
    "__shfl_xor_sync(mask, v, 3, {width})": lambda lane, width: (
        lane ^ 3 if (lane ^ 3) < lane // width * width + width else lane
    ),
    "__shfl_up_sync(mask, v, 3, {width})": lambda lane, width: lane - 3 if lane % width >= 3 else lane,
    "__shfl_down_sync(mask, v, 3, {width})": lambda lane, width: lane + 3 if lane % width + 3 < width else lane,
}


@pytest.mark.parametrize("width", [2, 8, 32])
@pytest.mark.parametrize("call", SHUFFLES)
def test_shuffles_read_the_lane_that_cuda_says(call: str, width: int, tmp_path: Path) -> None:
    body = f"""
        const unsigned mask = 0xffffffffu;
        const double v = threadIdx.x / 32 * 100 + threadIdx.x % 32;
        out[threadIdx.x] = {call.format(width=width)};"""
    out = np.zeros(64, np.float64)
    kernel_of(tmp_path, body, out=array("float64"))([1], [64], out)
    sources = [SHUFFLES[call](lane, width) for lane in range(32)]
    assert out.tolist() == [*sources, *(100 + source for source in sources)]


@pytest.mark.usefixtures("_build")
def test_votes_and_partial_masks(tmp_path: Path) -> None:
    body = """
        const int lane = threadIdx.x;
        const unsigned mask = lane < 8 ? 0xffu : 0xffffff00u;
        out[lane] = __ballot_sync(mask, lane % 3 == 0);
        out[32 + lane] = __any_sync(mask, lane == 2);
        out[64 + lane] = __all_sync(mask, lane != 2);
        __syncwarp(mask);
        if (lane < 8) out[96 + lane] = __shfl_sync(mask, lane, 7 - lane);"""
    out = np.zeros((4, 32), np.uint32)
    kernel_of(tmp_path, body, out=array("uint32"))([1], [32], out)
    thirds = sum(1 << lane for lane in range(0, 32, 3))
    assert out[0].tolist() == [thirds & 0xFF] * 8 + [thirds & 0xFFFFFF00] * 24
    assert out[1].tolist() == [1] * 8 + [0] * 24
    assert out[2].tolist() == [0] * 8 + [1] * 24
    assert out[3, :8].tolist() == list(range(7, -1, -1))


@pytest.mark.usefixtures("_build")
def test_atomics_lose_nothing(tmp_path: Path) -> None:
    body = """
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(&out[0], 1);
        atomicMax(&out[1], i);
        atomicMin(&out[2], -i);
        atomicOr(&out[3], 1 << i % 8);
        atomicAnd(&out[4], ~(1 << i % 8));
        if (atomicCAS(&out[5], 0, 1) == 0) out[6] = atomicExch(&out[7], 9);"""
    out = np.array([0, 0, 0, 0, -1, 0, 0, 5], np.int32)
    kernel_of(tmp_path, body, out=array("int32"))([3], [64], out)
    assert out.tolist() == [192, 191, -191, 255, ~255, 1, 5, 9]


@pytest.mark.usefixtures("_build")
def test_shared_memory_of_a_block_starts_without_the_last_ones_numbers(tmp_path: Path) -> None:
    body = """
        DYNAMIC_SHARED(float, dynamic);
        __shared__ float fixed[32];
        out[blockIdx.x * 64 + threadIdx.x] = dynamic[threadIdx.x];
        out[blockIdx.x * 64 + 32 + threadIdx.x] = fixed[threadIdx.x];
        dynamic[threadIdx.x] = fixed[threadIdx.x] = 1.0f;"""
    out = np.zeros(128, np.float32)
    kernel_of(tmp_path, body, out=array("float32"))([2], [32], out, shared=128)
    assert np.isnan(out).all()


SHARED = {
    "in a function of C": 'extern "C" __global__ void kernel(float* x) {{ __shared__ float tile[32]; {body} }}',
    "in a namespace": "namespace {{ __global__ void kernel(float* x) {{ __shared__ float tile[32]; {body} }} }}",
    "in a file": "__shared__ float tile[32];\n__global__ void kernel(float* x) {{ {body} }}",
    "in a method": """
        struct Tiles {{ __device__ float* tile() const {{ __shared__ float tile[32]; return tile; }} }};
        __global__ void kernel(float* x) {{ float* tile = Tiles().tile(); {body} }}""",
    "in a template": """
        template <class T> __device__ T* tile_of() {{ __shared__ T tile[32]; return tile; }}
        __global__ void kernel(float* x) {{
            tile_of<int>()[threadIdx.x] = 1;
            float* tile = tile_of<float>();
            {body}
        }}""",
    "in a lambda": """
        __global__ void kernel(float* x) {{
            auto tile_of = [] {{ __shared__ float tile[32]; return &tile[0]; }};
            float* tile = tile_of();
            {body}
        }}""",
}


@pytest.mark.usefixtures("_build")
@pytest.mark.parametrize("place", SHARED)
def test_shared_variables_are_known_wherever_they_are_declared(place: str, tmp_path: Path) -> None:
    body = "x[blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x]; tile[threadIdx.x] = 1.0f;"
    path = tmp_path / "kernel.cu"
    path.write_text(SHARED[place].format(body=body), encoding="utf-8")
    x = np.zeros(64, np.float32)
    Kernel("cpu", path, "kernel", x=array("float32"))([2], [32], x)
    assert np.isnan(x).all()


@pytest.mark.usefixtures("_build")
def test_constants_may_be_read_through_pointers(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(
        "__constant__ float table[4] = {1, 2, 3, 4};\n"
        "__device__ __noinline__ float at(const float* from, int i) { return from[i]; }\n"
        "__global__ void kernel(float* x) { x[threadIdx.x] = at(table, threadIdx.x % 4); }\n",
        encoding="utf-8",
    )
    x = np.zeros(32, np.float32)
    Kernel("cpu", path, "kernel", x=array("float32"))([1], [32], x)
    assert x.tolist() == [1, 2, 3, 4] * 8


@pytest.mark.usefixtures("_build")
def test_kernels_of_one_source_take_turns(tmp_path: Path) -> None:
    body = """
        __shared__ int tile[64];
        for (int i = 0; i < 20; ++i) {
            tile[threadIdx.x] = x[threadIdx.x];
            __syncthreads();
            x[threadIdx.x] = tile[63 - threadIdx.x] + 1;
            __syncthreads();
        }"""

    def launch(_: int) -> bool:
        kernel = kernel_of(tmp_path, body, x=array("int32"))
        results = []
        for _ in range(20):
            x = np.zeros(64, np.int32)
            kernel([1], [64], x)
            results.append((x == 20).all())
        return all(results)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(launch, range(2)))


FUNCTIONS = """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    exp[i] = exponential(x[i]);
    brain[i] = narrow<bfloat16>(x[i]);
    half[i] = narrow<float16>(x[i]);
    back[i] = widen(half[i]);"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    results = {"exp": "float32", "brain": "bfloat16", "half": "float16", "back": "float32"}
    arrays = {name: array(dtype) for name, dtype in results.items()}
    folder = tmp_path_factory.mktemp("functions")
    return kernel_of(folder, FUNCTIONS, x=readonly("float32"), **arrays, n=scalar("int32"))


def results_of(functions: Kernel, x: Array) -> tuple[Array, ...]:
    results = tuple(np.empty(x.size, dtype) for dtype in (np.float32, np.uint16, np.float16, np.float32))
    functions([-(-x.size // 256)], [256], x, *results, x.size)
    return results


@settings(max_examples=100, deadline=None)
@given(bits=arrays_of.arrays(np.uint32, st.integers(1, 300), elements=st.integers(0, 2**32 - 1)))
def test_conversions_round_half_to_even(functions: Kernel, bits: Array) -> None:
    x = np.concatenate([bits, bits & 0xFFFFE000 | 0x1000, bits & 0xFFFF0000 | 0x8000, bits >> 4]).view(np.float32)
    _, brain, half, back = results_of(functions, x)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.array_equal(half, x.astype(np.float16), equal_nan=True)
    assert np.array_equal(back, half.astype(np.float32), equal_nan=True)
    widened = (brain.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.array_equal(widened, rounded(x, "bfloat16"), equal_nan=True)


def test_every_float16_is_widened_exactly(functions: Kernel) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    _, _, half, back = results_of(functions, every.astype(np.float32))
    assert np.array_equal(half, every, equal_nan=True)
    assert np.array_equal(back, every.astype(np.float32), equal_nan=True)


def test_the_exponential_is_within_its_bound(functions: Kernel) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-110, 95, 200_000), rng.standard_normal(50_000) * 1e-3, [0.0, -0.0]])
    x = np.append(x, [np.inf, -np.inf, np.nan]).astype(np.float32)
    actual = results_of(functions, x)[0]
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64))
        nearest = exact.astype(np.float32)
    inside = np.isfinite(nearest)
    unit = np.spacing(np.maximum(nearest[inside], np.finfo(np.float32).tiny)).astype(np.float64)
    assert (np.abs(actual[inside] - exact[inside]) <= 1.5 * unit).all()
    assert np.array_equal(actual[~inside], nearest[~inside], equal_nan=True)


OPS = ("add", "swiglu", "rms_norm")
MODES = ("float32", "bfloat16")


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", MODES)
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_ops_agree_with_their_contracts_and_break_no_rule(
    op: str, dtype: str, build: Build, data: st.DataObject, seed: int
) -> None:
    contract = spec(op)
    dims = {name: data.draw(st.integers(low, high), label=name) for name, (low, high) in contract.dims.items()}
    with emulated(build, seed):
        case = contract.make_case(np.random.default_rng(seed), dims)
        check(contract, case, backend("cupy", "cpu"), Mode(dtype, dtype))


@pytest.mark.parametrize("op", OPS)
def test_the_order_of_threads_changes_no_bit(op: str) -> None:
    contract, emulator, mode = spec(op), backend("cupy", "cpu"), Mode("float32", "float32")
    dims = {name: most for name, (_, most) in contract.dims.items()}
    case = contract.make_case(np.random.default_rng(0), dims)
    results = []
    for seed in range(4):
        with emulated(seed=seed):
            results.append(run(contract, case, emulator, mode, emulator.table(mode), None))
    for result in results[1:]:
        assert all(np.array_equal(result[name], array) for name, array in results[0].items())


def test_an_empty_grid_launches_nothing(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, "not_even = compiled;", x=array("float32"))
    kernel([0], [32], np.zeros(0, np.float32))
    assert not kernel.built


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((np.zeros(4), np.zeros(4, np.uint16), 4), "argument x: its dtype is float64, not float32"),
        ((np.zeros(8, np.float32)[::2], np.zeros(4, np.uint16), 4), "argument x: its numbers do not lie"),
        (([0.0], np.zeros(4, np.uint16), 4), "argument x: it is a list, not a numpy.ndarray"),
        ((None, np.zeros(4, np.uint16), 4), "argument x: it is missing"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float16), 4), "argument y: its dtype is float16, not uint16"),
        ((np.zeros(4, np.float32), None, 2**31), "argument n: 2147483648 is no int32"),
        ((np.zeros(4, np.float32), None, 1.0), "argument n: 1.0 is no int32"),
        ((np.zeros(4, np.float32), None), "takes 3 arguments, not 2"),
    ],
)
def test_other_arguments_are_refused(arguments: tuple[Any, ...], complaint: str, tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, "", x=readonly("float32"), y=array("bfloat16", optional=True), n=scalar("int32"))
    with pytest.raises(TypeError, match=f"kernel {tmp_path.name}:kernel") as raised:
        kernel([1], [32], *arguments)
    assert complaint in str(raised.value)


def test_what_a_kernel_writes_has_to_be_writable(tmp_path: Path) -> None:
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="the kernel writes to it, and it is read-only"):
        kernel_of(tmp_path, "", x=array("float32"))([1], [32], frozen)


def test_a_block_of_too_many_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a block has 1 to 1024 threads, not \[1025, 1, 1\]"):
        kernel_of(tmp_path, "", x=array("float32"))([1], [1025], np.zeros(1, np.float32))


@pytest.mark.parametrize(
    ("grid", "block", "shared", "complaint"),
    [
        ((2**31,), (32,), 0, r"a grid is \[2147483647, 65535, 65535\] at most, not \[2147483648, 1, 1\]"),
        ((1, 65536), (32,), 0, r"not \[1, 65536, 1\]"),
        ((1, 1, 65536), (32,), 0, r"not \[1, 1, 65536\]"),
        ((-1,), (32,), 0, r"not \[-1, 1, 1\]"),
        ((0, 65536), (32,), 0, r"not \[0, 65536, 1\]"),
        ((1,), (1, 1, 65), 0, r"a block is \[1024, 1024, 64\] at most, not \[1, 1, 65\]"),
        ((1,), (-2, -2), 0, r"not \[-2, -2, 1\]"),
        ((1,), (32,), 65537, "a block has up to 65536 bytes of shared memory, not 65537"),
        ((1,), (32,), -1, "not -1"),
    ],
)
def test_what_cuda_does_not_launch_is_refused(
    grid: tuple[int, ...], block: tuple[int, ...], shared: int, complaint: str, tmp_path: Path
) -> None:
    kernel = kernel_of(tmp_path, "", x=array("float32"))
    with pytest.raises(ValueError, match=complaint):
        kernel(grid, block, np.zeros(1, np.float32), shared=shared)
    assert not kernel.built


def test_other_parameters_than_declared_do_not_compile(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text("__global__ void kernel(const float* x, int n) {}\n", encoding="utf-8")
    kernel = Kernel("cpu", path, "kernel", x=readonly("float32"), n=scalar("int64"))
    with pytest.raises(ConfigurationError, match="other arguments than Python declares: const float\\*, long long"):
        kernel.build()


def test_a_frame_that_no_stack_holds_does_not_compile(tmp_path: Path) -> None:
    body = "char large[200000]; for (int i = 0; i < n; ++i) large[x[i]] = i; x[0] = large[n];"
    with pytest.raises(ConfigurationError, match="frame size"):
        kernel_of(tmp_path, body, x=array("int32"), n=scalar("int32")).build()


def test_the_key_follows_what_is_included(tmp_path: Path) -> None:
    (tmp_path / "inner.cuh").write_text("// one\n", encoding="utf-8")
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n', encoding="utf-8")
    path = tmp_path / "kernel.cu"
    path.write_text('#include "outer.cuh"\n__global__ void kernel(float* x) {}\n', encoding="utf-8")
    source = Kernel("cpu", path, "kernel", x=array("float32")).source
    before = source.key("facts")
    assert source.key("facts") == before
    assert source.key("other facts") != before
    (tmp_path / "inner.cuh").write_text("// two\n", encoding="utf-8")
    assert source.key("facts") != before
    (tmp_path / "inner.cuh").unlink()
    with pytest.raises(ConfigurationError, match=r"includes 'inner\.cuh', which is neither beside it nor in"):
        source.key("facts")


def test_every_header_counts_for_the_identity_of_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Path] = []
    monkeypatch.setattr(registry, "digest", lambda sources, *facts: counted.extend(sources) or "")
    table = BackendOpTable("cupy", device="cpu", dtype="float32")
    table.bind("sample")
    table.numerics()
    headers = set(INCLUDE_FOLDER.rglob("*.cuh"))
    assert any(header.parent != INCLUDE_FOLDER for header in headers)
    assert headers <= set(counted)


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    assert "g++, which is not installed" in (toolchain_cupy.obstacle("cpu") or "")


ADD = """
import json
import numpy as np
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.kernels.jit.builds import QUEUE
add = BackendOpTable("cupy", device="cpu", dtype="float32").bind("add")
report = QUEUE.build_all(lambda *_: None)
x = np.ones((2, 3), np.float32)
add(x, x.copy())
assert (x == 2).all()
print(json.dumps([report.compiled, report.loaded]))
"""


def start(cache: Path) -> subprocess.Popen[str]:
    variables = {**os.environ, "POCKETLLM_CACHE_DIR": str(cache)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", ADD], env=variables, cwd="/", text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> list[int]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def test_a_damaged_library_is_built_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_CACHE_DIR", str(tmp_path / "cache"))

    def found() -> bool:
        return kernel_of(tmp_path, "x[threadIdx.x] = 3.0f;", x=array("float32")).build()

    assert [found(), found()] == [False, True]
    (library,) = (tmp_path / "cache").rglob("kernel.so")
    content = library.read_bytes()
    for damage in (b"", content[:100], content[:-1], content[:500] + b"x" + content[501:]):
        library.unlink()  # this process has it loaded
        library.write_bytes(damage)
        assert [found(), found()] == [False, True]


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    assert sorted(finish(process) for process in [start(tmp_path) for _ in range(2)]) == [[0, 1], [1, 0]]
    assert not list(tmp_path.rglob("build-*"))


def test_without_a_cache_kernels_are_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("POCKETLLM_CACHE_DIR", str(blocked))
    kernel = kernel_of(tmp_path, "x[threadIdx.x] = 3.0f;", x=array("float32"))
    x = np.zeros(32, np.float32)
    with caplog.at_level(logging.WARNING):
        kernel([1], [32], x)
    assert (x == 3).all()
    assert "compiled kernels cannot be kept below" in caplog.text
