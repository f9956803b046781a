"""The check of a machine with a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pocketllm.bench import gpu_check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the check would run")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [str(ROOT / "bench" / "gpu_check.sh"), str(record)]
    settings = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "pocketllm: error: PyTorch sees no CUDA device; this check is for a machine that has one\n"
    assert not record.exists()


def test_without_a_file_it_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "give one file to write to" in capsys.readouterr().err


def test_what_pytest_reports_is_read_back(tmp_path: Path) -> None:
    test = tmp_path / "test_three.py"
    test.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no such thing')\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
    )
    junit = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", str(test), f"--junitxml={junit}", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    found = gpu_check.outcome_of(junit.read_text())
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert found["failed"].keys() == {"test_three::test_bad", "test_three::test_error"}
    assert "one is not two" in found["failed"]["test_three::test_bad"]


def test_a_part_that_does_not_end_is_stopped_and_told() -> None:
    command = ["-c", "import time; print('begun', flush=True); time.sleep(60)"]
    assert gpu_check._run(command, seconds=3) == (None, "begun\n")


STARTS_ANOTHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_what_a_stopped_part_has_started_ends_with_it() -> None:
    status, output = gpu_check._run(["-c", STARTS_ANOTHER], seconds=3)
    assert status is None
    for _ in range(1000):  # what is killed takes a moment to end
        if not _runs(int(output)):
            return
        time.sleep(0.01)
    pytest.fail(f"process {output.strip()} goes on")


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_ends_is_told_with_its_status() -> None:
    assert gpu_check._run(["-c", "print('done'); raise SystemExit(3)"], seconds=60) == (3, "done\n")


@pytest.fixture(scope="module")
def chosen() -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", *gpu_check._TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_every_test_of_cuda_is_chosen_but_those_of_the_emulator(chosen: set[str]) -> None:
    files = {test.partition("::")[0] for test in chosen}
    of_the_emulator = {f"tests/kernels/test_cuda_{name}.py" for name in ("emulator", "faults", "address")}
    there = {f"tests/kernels/{path.name}" for path in (ROOT / "tests" / "kernels").glob("test_cuda_*.py")}
    assert of_the_emulator < there
    assert {file for file in files if "test_cuda_" in file} == there - of_the_emulator


def test_runtimes_are_chosen_on_both_backends_in_both_dtypes(chosen: set[str]) -> None:
    name = "tests/runtimes/test_gpu_runtimes.py::test_draws_and_scores_agree_with_the_logits"
    runs = {f"{name}[{backend}-{dtype}]" for backend in gpu_check.BACKENDS for dtype in gpu_check.BENCH_SECONDS}
    assert runs <= chosen


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:10:24 UTC 2025\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124  Release Build\n", "570.124"),
        ("nothing of the kind", "unknown"),
    ],
)
def test_the_drivers_version_is_read(told: str, version: str, tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert gpu_check._driver_version(file) == "unknown"
    file.write_text(told)
    assert gpu_check._driver_version(file) == version
