"""Faults seeded into kernels, each of which the emulator has to report with kernel, line, block and thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
    "in a function that the kernel calls": """
        set(y, 128 + threadIdx.x);""",
}


def kernel_of(body: str, folder: Path) -> tuple[Kernel, int]:
    """A kernel on x [64] and y [128] with this body, and its line marked HERE."""
    code = (
        '#include "dynamic_shared.cuh"\n'
        "__device__ void set(float* to, int at) {\n"
        f"    to[at] = 1.0f;{'  // HERE' if 'HERE' not in body else ''}\n"
        "}\n"
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
        "in a function that the kernel calls": "past the end of argument y, at element 128 of 128",
    }
    assert memory[name] in message


UNDER_ADDRESS_SANITIZER = """
import sys
from pathlib import Path
from tests.kernels.test_cuda_faults import BOUNDS, kernel_of
from pocketllm.kernels.jit.cuda_emulator.settings import emulated
import numpy as np
kernel, line = kernel_of(BOUNDS[sys.argv[1]], Path(sys.argv[2]))
base = np.zeros(1000, np.float32)
print("marked", line)
with emulated("address"):
    kernel([1], [64], base[100:164], base[200:328], shared=200)
"""


@pytest.mark.parametrize("name", ["past the end of an argument", "past the end of a shared array"])
def test_address_sanitizer_finds_an_index_out_of_bounds(name: str, tmp_path: Path) -> None:
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {**os.environ, "LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", UNDER_ADDRESS_SANITIZER, name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    line = done.stdout.split()[1]
    assert f"in faulty(float*, float*) {tmp_path}/faulty.cu:{line}" in done.stderr, done.stderr
