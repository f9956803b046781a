"""The kernels in CUDA C at the ends of their sizes under AddressSanitizer, with lanes in shuffled order.

The sanitizer has to be in a process from its start, so that this one starts another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pocketllm.kernels.checking.arrays import backend

ROOT = Path(__file__).resolve().parents[2]


def sanitizer() -> str:
    command = ["g++", "-print-file-name=libasan.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(backend("cupy").device != "cpu", reason="kernels run on a GPU")
def test_no_kernel_reads_or_writes_past_an_array() -> None:
    settings = os.environ | {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
    chosen = ["tests/kernels/test_implementations.py", "-k", "cupy and float32 and ends"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    emulated = ["--emulator=address", "--emulator-seed=3"]
    done = subprocess.run([*command, *emulated], cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
