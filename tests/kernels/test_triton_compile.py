"""The Triton kernels compile for GPUs that are not here, spill no register, and are all there before the first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pocketllm.kernels.jit.report_triton import CAPABILITIES, ops

ROOT = Path(__file__).resolve().parents[2]
EVERY_GPU = pytest.mark.parametrize("capability", CAPABILITIES, ids="sm_{}".format)


@cache
def report(capability: int) -> dict[str, Any]:
    """See `tests.kernels.triton_offline`; the tests' own process has Triton as an interpreter."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton_offline", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@EVERY_GPU
def test_every_kernel_of_every_model_compiles_and_spills_nothing(capability: int) -> None:
    rows = report(capability)["rows"]
    assert {row["kernel"].partition(":")[0] for row in rows} == set(ops())
    assert {row["architecture"] for row in rows} == {f"sm_{capability}"}
    assert all(row["registers"] > 0 for row in rows)
    assert [row for row in rows if row["spilled"]] == []


@EVERY_GPU
def test_shared_memory_is_within_what_a_block_may_have(capability: int) -> None:
    # Bytes that a block can opt in to, by NVIDIA's table of compute capabilities.
    most = {80: 163 * 1024, 90: 227 * 1024}[capability]
    assert [row for row in report(capability)["rows"] if row["shared"] > most] == []


@EVERY_GPU
def test_sizes_that_no_vector_divides_compile_too(capability: int) -> None:
    rows = report(capability)["odd sizes"]
    assert {row["kernel"].partition(":")[0] for row in rows} == set(ops())


def test_nothing_is_left_to_compile_once_a_model_is_loaded() -> None:
    assert report(CAPABILITIES[0])["late"] == []


def test_every_function_is_reached() -> None:
    assert report(CAPABILITIES[0])["unused"] == []
