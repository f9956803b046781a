"""Running the program as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run_cli(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The finished program; it sees this process's environment."""
    command = [sys.executable, "-m", "pocketllm", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=300, check=False, cwd=cwd or "/"
    )


def error_of(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line that a failed run says."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    if not line.startswith("pocketllm: error: "):
        pytest.fail(f"no error line: {line}")
    return line.removeprefix("pocketllm: error: ")
