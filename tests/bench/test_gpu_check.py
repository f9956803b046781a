"""The check of a machine with a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import os
import subprocess
import sys
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
    status, output = gpu_check._run(["-c", "import time; print('begun', flush=True); time.sleep(60)"], seconds=3)
    assert status is None
    assert "begun" in output
