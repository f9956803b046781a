"""Faults seeded into kernels, each of which the emulator has to report with kernel, line, block and thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.cuda_emulator.faults import KernelFaultError
from pocketllm.kernels.jit.cuda_emulator.settings import Build, emulated
from pocketllm.kernels.jit.cuda_source import array
from pocketllm.kernels.jit.toolchain_cupy import Kernel

BARRIER = {
    "some threads return": """
        if (threadIdx.x >= 40) return;
        __syncthreads();  // HERE""",
    "some threads go around": """
        if (threadIdx.x < 40) __syncthreads();  // HERE
        x[threadIdx.x] = 1.0f;""",
    "two lines wait for each other": """
        if (threadIdx.x < 40) {
            __syncthreads();  // HERE
        } else {
            __syncthreads();
        }""",
}

WARP = {
    "a lane is missing": """
        if (threadIdx.x % 32 < 20) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);  // HERE""",
    "a lane waits at a barrier": """
        if (threadIdx.x % 32 < 20) __syncwarp();  // HERE
        __syncthreads();""",
    "masks differ": """
        __ballot_sync(threadIdx.x % 32 == 3 ? 0xfu : 0xffffffffu, 1);  // HERE""",
    "lines differ": """
        if (threadIdx.x % 2 == 0) {
            __syncwarp();  // HERE
        } else {
            __syncwarp();
        }""",
    "the mask leaves out the caller": """
        x[threadIdx.x] = __shfl_sync(0xffffu, x[threadIdx.x], 0);  // HERE""",
    "the mask leaves out the source": """
        if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 16 + threadIdx.x);  // HERE""",
}

RACE = {
    "a barrier is missing": """
        __shared__ float tile[64];
        tile[threadIdx.x] = x[threadIdx.x];
        y[threadIdx.x] = tile[63 - threadIdx.x];  // HERE""",
    "a barrier is missing before the next round": """
        __shared__ float first;
        for (int i = 0; i < 2; ++i) {
            if (threadIdx.x == 0) first = x[i];  // HERE
            __syncthreads();
            y[i * 64 + threadIdx.x] = first;
        }""",
    "a warp relies on lockstep": """
        __shared__ float tile[64];
        tile[threadIdx.x] = x[threadIdx.x];
        y[threadIdx.x] = tile[threadIdx.x ^ 1];  // HERE""",
    "a warp's barrier orders no other warp": """
        __shared__ float tile[64];
        tile[threadIdx.x] = x[threadIdx.x];
        __syncwarp();
        y[threadIdx.x] = tile[threadIdx.x ^ 32];  // HERE""",
    "threads add without an atomic": """
        x[0] += 1.0f;  // HERE""",
    "blocks write the same element": """
        y[threadIdx.x] = blockIdx.x;  // HERE""",
    "threads fill the same elements": """
        memset(x, 0, 256);  // HERE""",
    "an atomic and a plain access": """
        if (threadIdx.x == 0) atomicAdd(&x[0], 1.0f);
        y[threadIdx.x] = x[0];  // HERE""",
}

BOUNDS = {
    "past the end of an argument": """
        x[threadIdx.x + 1] = 0.0f;  // HERE""",
    "before the start of an argument": """
        y[threadIdx.x] = x[static_cast<int>(threadIdx.x) - 1];  // HERE""",
    "past the end of a shared array": """
        __shared__ float tile[60];
        tile[threadIdx.x] = x[threadIdx.x];  // HERE
        __syncthreads();
        y[threadIdx.x] = tile[0];""",
    "past the end of dynamic shared memory": """
        DYNAMIC_SHARED(float, tile);
        tile[threadIdx.x] = 0.0f;  // HERE""",
    "past the end of a shared array of 256 bytes": """
        __shared__ float tile[64];
        tile[threadIdx.x + 1] = x[threadIdx.x];  // HERE
        __syncthreads();
        y[threadIdx.x] = tile[1];""",
    "past the end of the first of two shared arrays": """
        __shared__ float tile[256], other[256];
        if (threadIdx.x == 0) tile[0] = other[0] = x[0];
        __syncthreads();
        y[threadIdx.x] = other[0] + tile[threadIdx.x * 256];  // HERE""",
    "past the end of the second of two shared arrays": """
        __shared__ float other[256], tile[256];
        if (threadIdx.x == 0) tile[0] = other[0] = x[0];
        __syncthreads();
        y[threadIdx.x] = other[0] + tile[threadIdx.x * 256];  // HERE""",
    "in a function that the kernel calls": """
        set(y, 128 + threadIdx.x);""",
    "a copy reads past the end": """
        if (threadIdx.x == 0) memcpy(y, x, 260);  // HERE""",
    "a copy writes past the end": """
        if (threadIdx.x == 0) memmove(x, y, 260);  // HERE""",
    "a fill writes past the end": """
        if (threadIdx.x == 0) memset(x + 63, 0, 8);  // HERE""",
    "at a null pointer": """
        y[threadIdx.x] = *reinterpret_cast<float*>(threadIdx.x * 4ull);  // HERE""",
    "far from everything": """
        x[1ull << 40] = 1.0f;  // HERE""",
    "a variable of CUDA's own": """
        const_cast<unsigned&>(threadIdx.y) = 1;  // HERE""",
}

UNDEFINED = {
    "in groups of 0 lanes": "__shfl_sync(0xffffffffu, 1.0f, 77, 0)",
    "in groups of 64 lanes": "__shfl_sync(0xffffffffu, 1.0f, 50, 64)",
    "in groups of 12 lanes": "__shfl_down_sync(0xffffffffu, 1.0f, 4, 12)",
    "with a lane -1 away": "__shfl_xor_sync(0xffffffffu, 1.0f, -1)",
    "with a lane 64 away": "__shfl_xor_sync(0xffffffffu, 1.0f, 64)",
    "with a lane 32 away": "__shfl_up_sync(0xffffffffu, 1.0f, 32)",
    "with a lane -2 away": "__shfl_down_sync(0xffffffffu, 1.0f, static_cast<unsigned>(-2))",
}

CRASH = {
    "divides an integer by zero": """
        y[threadIdx.x] = 5 / static_cast<int>(x[threadIdx.x]);  // HERE""",
    "comes upon an instruction that is none": """
        __builtin_trap();  // HERE""",
    "leaves its stack": """
        y[threadIdx.x] = down(100000);""",
    "leaves its stack: a function calls itself too often, or an index lies outside of a local array": """
        float own[4] = {x[0], x[1], x[2], x[3]};
        own[static_cast<int>(threadIdx.x) * 1000 - 100000] = 1.0f;  // HERE
        y[threadIdx.x] = own[threadIdx.x % 4];""",
}

MISALIGNED = {
    "four numbers at once from the second on": """
        const float4 four = *reinterpret_cast<const float4*>(x + 1);  // HERE
        if (threadIdx.x == 0) y[0] = four.x * four.w + four.y;""",
    "two numbers at once to the second and third": """
        if (threadIdx.x == 0) *reinterpret_cast<int2*>(x + 1) = make_int2(1, 2);  // HERE""",
    "a number from a byte within another": """
        if (threadIdx.x == 0) y[0] = *reinterpret_cast<const int*>(reinterpret_cast<const char*>(x) + 2);  // HERE""",
    "an atomic on a half of two numbers": """
        if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(x + 1), 1ull);  // HERE""",
}


def kernel_of(body: str, folder: Path) -> tuple[Kernel, int]:
    """A kernel on x [64] and y [128] with this body, and its line marked HERE."""
    code = (
        '#include "dynamic_shared.cuh"\n'
        "__device__ void set(float* to, int at) {\n"
        f"    to[at] = 1.0f;{'  // HERE' if 'set(' in body and 'HERE' not in body else ''}\n"
        "}\n"
        "__device__ __noinline__ int down(int steps) { volatile int own[1000]; own[steps % 1000] = steps; "
        f"return steps == 0 ? 0 : down(steps - 1) + own[0]; }}{'  // HERE' if 'down(1' in body else ''}\n"
        "__global__ void faulty(float* x, float* y) {" + body + "\n}\n"
    )
    path = folder / "faulty.cu"
    path.write_text(code, encoding="utf-8")
    line = next(number for number, text in enumerate(code.splitlines(), 1) if "HERE" in text)
    return Kernel("cpu", path, "faulty", x=array("float32"), y=array("float32")), line


def fault_of(body: str, folder: Path, build: Build, blocks: int = 2, seed: int = 0) -> str:
    """The message, without the line, of which it is seen to be the marked one."""
    kernel, line = kernel_of(body, folder)
    x, y = np.zeros(64, np.float32), np.zeros(128, np.float32)
    with emulated(build, seed), pytest.raises(KernelFaultError) as raised:
        kernel([blocks], [64], x, y, shared=200)
    message = str(raised.value)
    prefix = f"kernel {folder.name}:faulty, {folder.name}/faulty.cu:{line}: thread ("
    assert message.startswith(prefix)
    return message.removeprefix(prefix)


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("name", BARRIER)
def test_a_barrier_that_not_all_threads_reach_is_reported(name: str, build: Build, tmp_path: Path) -> None:
    message = fault_of(BARRIER[name], tmp_path, build)
    assert "0, 0, 0) of block (0, 0, 0) waits at a barrier, but thread (40, 0, 0)" in message


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("name", WARP)
def test_a_warp_operation_that_is_not_whole_is_reported(name: str, build: Build, tmp_path: Path) -> None:
    assert "mask 0x" in fault_of(WARP[name], tmp_path, build)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", RACE)
def test_a_race_is_reported_whatever_the_order(name: str, seed: int, tmp_path: Path) -> None:
    kernel, line = kernel_of(RACE[name], tmp_path)
    x, y = np.zeros(64, np.float32), np.zeros(128, np.float32)
    with emulated("checked", seed), pytest.raises(KernelFaultError, match="with nothing that orders the two") as raised:
        kernel([2 if "blocks" in name else 1], [64], x, y)
    # Either of the two accesses comes first, as the order has it.
    assert f"{tmp_path.name}/faulty.cu:{line}" in str(raised.value)


@pytest.mark.parametrize("name", BOUNDS)
def test_an_index_out_of_bounds_is_reported(name: str, tmp_path: Path) -> None:
    message = fault_of(BOUNDS[name], tmp_path, "checked", blocks=1)
    memory = {
        "past the end of an argument": "writes 4 bytes past the end of argument x, at element 64 of 64",
        "before the start of an argument": "reads 4 bytes before the start of argument x, at element -1 of 64",
        "past the end of a shared array": "past the end of shared variable tile, at byte 240 of 240",
        "past the end of dynamic shared memory": "past the end of the dynamic shared memory, at byte 200 of 200",
        "past the end of a shared array of 256 bytes": "past the end of shared variable tile, at byte 256 of 256",
        "past the end of the first of two shared arrays": "past the end of shared variable tile, at byte 1024 of 1024",
        "past the end of the second of two shared arrays": "past the end of shared variable tile, at byte 1024 of 1024",
        "in a function that the kernel calls": "past the end of argument y, at element 128 of 128",
        "a copy reads past the end": "reads 260 bytes past the end of argument x, at element 0 of 64",
        "a copy writes past the end": "writes 260 bytes past the end of argument x, at element 0 of 64",
        "a fill writes past the end": "writes 8 bytes past the end of argument x, at element 63 of 64",
        "at a null pointer": "reads 4 bytes at 0x0, an address that belongs to no argument and no shared memory",
        "far from everything": "an address that belongs to no argument and no shared memory",
        "a variable of CUDA's own": "an address that belongs to no argument and no shared memory",
    }
    assert memory[name] in message


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("name", UNDEFINED)
def test_a_shuffle_that_cuda_does_not_define_is_reported(name: str, build: Build, tmp_path: Path) -> None:
    message = fault_of(f"x[threadIdx.x] = {UNDEFINED[name]};  // HERE", tmp_path, build)
    assert f"0, 0, 0) of block (0, 0, 0) shuffles {name}; CUDA has" in message


@pytest.mark.parametrize("build", ["plain", "checked"])
@pytest.mark.parametrize("story", CRASH)
def test_a_crash_is_a_fault_of_the_kernel(story: str, build: Build, tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGINT)]
    for _ in range(2):  # the process goes on as before
        assert story in fault_of(CRASH[story], tmp_path, build)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGINT)]


def test_a_null_pointer_is_reported_in_every_build(tmp_path: Path) -> None:
    message = fault_of("*reinterpret_cast<volatile float*>(threadIdx.y * 4ull) = 1.0f;  // HERE", tmp_path, "plain")
    assert "reads or writes where there is no memory" in message


def test_a_failed_assertion_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "asserting.cu"
    path.write_text("#include <cassert>\n__global__ void kernel(float* x) { assert(x[0] > 5); }\n", encoding="utf-8")
    with pytest.raises(KernelFaultError, match=f"kernel {tmp_path.name}:kernel, .* gives up: an assertion failed"):
        Kernel("cpu", path, "kernel", x=array("float32"))([1], [1], np.zeros(1, np.float32))


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
import numpy as np
from pocketllm.kernels.jit.cuda_emulator.settings import emulated
from tests.kernels.test_cuda_faults import kernel_of
signal.signal(signal.SIGINT, signal.default_int_handler)
x, y = np.zeros(64, np.float32), np.zeros(128, np.float32)
def interrupt():
    while x[0] == 0:  # the kernel runs
        pass
    os.kill(os.getpid(), signal.SIGINT)
kernel, _ = kernel_of("while (x[63] == 0) *static_cast<volatile float*>(x) = 1.0f;  // HERE", Path(sys.argv[1]))
with emulated(sys.argv[2]):
    kernel.build()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        kernel([1], [1], x, y)
    except KeyboardInterrupt:
        print("interrupted")
    thread.join()
    x[63] = 1
    kernel([1], [1], x, y)
"""


def python(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that has the tests' modules, for what would end or hang this one."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


@pytest.mark.parametrize("build", ["plain", "checked"])
def test_an_endless_loop_ends_with_an_interrupt(build: Build, tmp_path: Path) -> None:
    done = python(INTERRUPTED, str(tmp_path), build)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_without_addr2line_the_fault_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _ = kernel_of("x[threadIdx.x + 1] = 0.0f;  // HERE", tmp_path)
    with emulated("checked"):
        kernel.build()
        failing_tool("addr2line", tmp_path, monkeypatch)
        with pytest.raises(KernelFaultError, match=r"instruction 0x.*no licence.*end of argument x") as raised:
            kernel([1], [64], np.zeros(64, np.float32), np.zeros(128, np.float32))
    assert "thread (63, 0, 0)" in str(raised.value)


def failing_tool(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a program of that name only fails."""
    tool = folder / name
    tool.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_without_the_list_of_symbols_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_CACHE_DIR", str(tmp_path / "cache"))
    failing_tool("nm", tmp_path, monkeypatch)
    kernel, _ = kernel_of("x[0] = 1.0f;  // HERE", tmp_path)
    with pytest.raises(ConfigurationError, match="no licence"):
        kernel.build()


@pytest.mark.parametrize("name", MISALIGNED)
def test_a_misaligned_access_is_reported(name: str, tmp_path: Path) -> None:
    message = fault_of(MISALIGNED[name], tmp_path, "checked", blocks=1)
    at = {
        "four numbers at once from the second on": "reads 16 bytes at once at byte 4 of argument x, which is no",
        "two numbers at once to the second and third": "writes 8 bytes at once at byte 4 of argument x, which is no",
        "a number from a byte within another": "reads 4 bytes at once at byte 2 of argument x, which is no multiple of",
        "an atomic on a half of two numbers": "writes 8 bytes at once at byte 4 of argument x, which is no multiple of",
    }
    assert at[name] in message


def test_copies_by_bytes_may_be_misaligned(tmp_path: Path) -> None:
    kernel, _ = kernel_of("if (threadIdx.x == 0) memcpy(y, reinterpret_cast<char*>(x) + 2, 4);  // HERE", tmp_path)
    x, y = np.arange(64, dtype=np.float32), np.zeros(128, np.float32)
    with emulated("checked"):
        kernel([1], [64], x, y)
    assert y[0] == x.view(np.uint8)[2:6].view(np.float32)[0]


UNDER_ADDRESS_SANITIZER = """
import sys
from pathlib import Path
from tests.kernels.test_cuda_faults import BOUNDS, kernel_of
from pocketllm.kernels.jit.cuda_emulator.settings import emulated
import numpy as np
kernel, line = kernel_of(BOUNDS[sys.argv[1]], Path(sys.argv[2]))
base = np.zeros(1000, np.float32)
print("marked", line, flush=True)  # the sanitizer ends the process without emptying its buffers
with emulated("address"):
    kernel([1], [64], base[100:164], base[200:328], shared=200)
"""


@pytest.mark.parametrize("name", [name for name in BOUNDS if name.startswith("past the end of")])
def test_address_sanitizer_finds_an_index_out_of_bounds(name: str, tmp_path: Path) -> None:
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    sanitizer = {"LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = python(UNDER_ADDRESS_SANITIZER, name, str(tmp_path), **sanitizer)
    assert done.returncode != 0
    line = done.stdout.split()[1]
    assert f"in faulty(float*, float*) {tmp_path}/faulty.cu:{line}" in done.stderr, done.stderr
