"""Which device computes when none is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")
"""Where the driver tells its version while it is loaded."""


def default_device() -> str:
    """``cuda:0`` where a driver is loaded and PyTorch sees a device, else ``cpu``.

    Without a driver nothing is imported.
    """
    if not DRIVER.exists() or importlib.util.find_spec("torch") is None:
        return "cpu"
    return "cuda:0" if importlib.import_module("torch").cuda.is_available() else "cpu"
