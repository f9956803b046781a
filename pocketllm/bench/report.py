"""What has to stand beside a figure for it to mean something."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("pocketllm", "numpy", "torch", "numba", "triton")


def circumstances() -> dict[str, str]:
    """Machine, versions, commit and time."""
    found = {"machine": f"{_processor()}, {os.cpu_count()} cores", "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"commit": _commit(), "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The checkout's commit, marked when files differ from it; "unknown" for an installed copy."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
