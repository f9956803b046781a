"""What a kernel's source and its arguments cannot be: refused with the kernel's name and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.kernels.jit.cuda_emulator import compiler
from pocketllm.kernels.jit.cuda_source import array, readonly, scalar
from pocketllm.kernels.jit.toolchain_cupy import Kernel
from tests.kernels.test_cuda_emulator import kernel_of


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("float32", 1e300), ("float32", -1e39), ("float32", 10**400), ("float64", 10**400), ("float64", -(10**400))],
)
def test_a_number_beyond_its_type_is_refused(dtype: str, number: float, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"argument n: .* is no {dtype}"):
        kernel_of(tmp_path, "", n=scalar(dtype))([1], [1], number)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 3, np.float64(2.5), 3.4e38])
def test_numbers_arrive_as_they_are(number: float, tmp_path: Path) -> None:
    x = np.zeros(1, np.float32)
    kernel_of(tmp_path, "x[0] = n;", x=array("float32"), n=scalar("float32"))([1], [1], x, number)
    assert np.array_equal(x, [np.float32(number)], equal_nan=True)


@pytest.mark.parametrize("declare", [array, readonly, scalar])
def test_a_dtype_that_kernels_do_not_have_is_refused(declare: Any) -> None:
    with pytest.raises(TypeError, match=r"a kernel takes no float8: .*float32.*bfloat16"):
        declare("float8")


def test_a_file_that_is_no_kernel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.cu").mkdir()
    (tmp_path / "latin.cu").write_bytes("// caf\u00e9\n".encode("latin-1"))
    for name, reason in (("missing.cu", "No such file"), ("folder.cu", "Is a directory"), ("latin.cu", "not UTF-8")):
        with pytest.raises(ConfigurationError, match=f"kernel {tmp_path.name}:kernel: .*{name}.* {reason}"):
            Kernel("cpu", tmp_path / name, "kernel", x=array("float32")).build()
    with pytest.raises(ConfigurationError, match="a quotation mark"):
        Kernel("cpu", tmp_path / 'a".cu', "kernel", x=array("float32"))


def test_a_kernel_may_be_named_by_a_path_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel.cu").write_text("__global__ void kernel(float* x) { x[0] = 1.0f; }\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    kernel, x = Kernel("cpu", "kernel.cu", "kernel", x=array("float32")), np.zeros(1, np.float32)
    monkeypatch.chdir("/")
    kernel([1], [1], x)
    assert x[0] == 1


def test_includes_in_comments_are_none(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text('/* once\n#include "gone.cuh"\n*/\n// no\n__global__ void kernel(float* x) {}\n', encoding="utf-8")
    assert Kernel("cpu", path, "kernel", x=array("float32")).source.files() == (path,)


@pytest.mark.parametrize(
    ("declaration", "complaint"),
    [
        (
            "struct S { float v; S() : v(0) {} };\n__device__ S* all() { __shared__ S s[4]; return s; }",
            "s is initialised",
        ),
        ("__device__ int* all() { __shared__ int s[2] = {1, 2}; return s; }", "s is initialised"),
        ("__device__ int counter; __device__ int* all() { return &counter; }", "counter would lie in device memory"),
        ("__device__ int* all() { static int counter = 1; return &counter; }", "counter would lie in device memory"),
        ("__device__ int* all(int n = 3) { int s[n]; s[0] = n; return s + s[0]; }", "variable length array"),
    ],
)
def test_variables_that_a_kernel_cannot_have_are_refused(declaration: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    code = f"{declaration}\n__global__ void kernel(float* x) {{ x[0] = *reinterpret_cast<float*>(all()); }}\n"
    path.write_text(code, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=f"(?s)kernel {tmp_path.name}:kernel.*{complaint}"):
        Kernel("cpu", path, "kernel", x=array("float32")).build()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\necho no licence >&2\nexit 1\n", encoding="utf-8")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler.version.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="does not tell its version:\nno licence"):
            compiler.version()
    finally:
        compiler.version.cache_clear()
