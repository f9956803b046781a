"""What has to stand beside a figure for it to mean something."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = (
    "pocketllm",
    "numpy",
    "torch",
    "numba",
    "triton",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc",
    "transformers",
    "llama-cpp-python",
)

OTHERS = "CPU time of other processes"
QUIET = 0.05
"""The share of all cores that others may take before figures of speed are not to be trusted."""


class Circumstances:
    """Machine, versions, commit, command and time; the clock of what others take runs from here to `as_dict`."""

    def __init__(self) -> None:
        self._began = datetime.datetime.now(datetime.UTC)
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def as_dict(self) -> dict[str, str]:
        """Everything as text. Child processes must have ended, or their time counts as that of others."""
        found = {
            "machine": f"{_processor()}, {usable_cores()} cores",
            "system": f"{platform.system()} {platform.machine()}",
        }
        found["python"] = platform.python_version()
        for package in PACKAGES:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "not installed"
        now = datetime.datetime.now(datetime.UTC)
        return found | {
            "commit": _commit(),
            "command": f"{_program()} {shlex.join(map(_unrooted, sys.argv[1:]))}",
            "time": self._began.isoformat(timespec="seconds"),
            "seconds": f"{(now - self._began).total_seconds():.0f}",
            OTHERS: self._others(now),
        }

    def _others(self, now: datetime.datetime) -> str:
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return "unknown"
        available = (now - self._began).total_seconds() * (os.cpu_count() or 1)
        others = busy - self._busy - (_own_seconds() - self._own)
        return f"{max(others, 0) / available:.0%}"


def unrest(circumstances: Mapping[str, str]) -> str:
    """A warning for a record that was made while others were at work; "" when the machine was quiet."""
    share = circumstances[OTHERS]
    if not share.endswith("%") or float(share[:-1]) <= QUIET * 100:
        return ""
    return f"**Not a quiet machine: other processes took {share} of its cores. Do not trust these speeds.**"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _program() -> str:
    return "python -m pocketllm.bench" if Path(sys.argv[0]).parent.name == "bench" else "pocketllm"


def _unrooted(argument: str) -> str:
    """An absolute path by its name alone: where it lies is the user's own business."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _busy_seconds() -> float | None:
    """Seconds that all cores together were not idle, time taken by other guests included; None where nobody tells."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    user, nice, system, _idle, _iowait, *rest = map(int, path.read_text().split("\n", 1)[0].split()[1:])
    interrupts_and_steal = sum(rest[:3])
    return (user + nice + system + interrupts_and_steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


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
