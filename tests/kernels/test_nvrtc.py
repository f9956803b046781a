"""CUDA C kernels through NVRTC, which compiles for GPUs that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.cuda_source import KernelSource, array, readonly, scalar
from pocketllm.kernels.jit.loading_cupy import compile_cubin
from pocketllm.kernels.jit.report_cupy import CAPABILITIES, ops, resources_of, rows, timed_kernels

ELF = b"\x7fELF"

SPILLING = CAPABILITIES[:3]
"""What is compiled for every op; the others have as many registers, and take as long."""


@pytest.mark.parametrize("capability", SPILLING)
@pytest.mark.parametrize("op", ops())
def test_every_kernel_compiles_and_spills_nothing(op: str, capability: int) -> None:
    sources = timed_kernels(op)
    assert sources
    for source in sources:
        assert resources_of(source, f"sm_{capability}").spilled == 0


def test_a_cubin_has_the_kernel_under_its_symbol() -> None:
    (source,) = {source.name: source for source in timed_kernels("add") if "bfloat16" in source.name}.values()
    compiled = compile_cubin(source, "sm_80")
    assert compiled.cubin.startswith(ELF)
    assert compiled.symbol.encode() in compiled.cubin
    assert "add" in compiled.symbol


def test_the_report_has_a_line_for_each_kernel_and_architecture() -> None:
    lines = list(rows(["rms_norm"]))
    assert {line["architecture"] for line in lines} == {f"sm_{capability}" for capability in CAPABILITIES}
    assert {line["kernel"] for line in lines} == {"rms_norm:rms_norm"}
    assert all(line["registers"] > 0 and line["shared"] > 0 for line in lines)


def test_shared_memory_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(
        "__global__ void kernel(float* x) {\n"
        "    __shared__ float tile[64];\n"
        "    tile[threadIdx.x] = x[threadIdx.x];\n"
        "    __syncthreads();\n"
        "    x[threadIdx.x] = tile[63 - threadIdx.x];\n"
        "}\n",
        encoding="utf-8",
    )
    assert resources_of(KernelSource(path, "kernel", {"x": array("float32")}), "sm_90").shared == 256


def test_what_does_not_compile_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text("__global__ void kernel(float* x) {\n    x[0] = y;\n}\n", encoding="utf-8")
    source = KernelSource(path, "kernel", {"x": array("float32")})
    with pytest.raises(ConfigurationError, match=r"does not compile for sm_90:\n.*kernel\.cu\(2\)"):
        compile_cubin(source, "sm_90")


def test_other_parameters_than_declared_do_not_compile(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text("template <class T> __global__ void kernel(const T* x, int n) {}\n", encoding="utf-8")
    source = KernelSource(path, "kernel<float>", {"x": readonly("float32"), "n": scalar("float32")})
    with pytest.raises(ConfigurationError, match="other arguments than Python declares: const float\\*, float"):
        compile_cubin(source, "sm_90")
