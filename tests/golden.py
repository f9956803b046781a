"""Golden data of independent origin, where ``POCKETLLM_FIXTURES`` points to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["POCKETLLM_FIXTURES"]) if os.environ.get("POCKETLLM_FIXTURES") else None


def tiny_checkpoints(*names: str) -> list[Path]:
    """The tiny checkpoints of these names that are there; none without the fixtures."""
    return [] if FOLDER is None else [FOLDER / "tiny" / name for name in names]


def golden(folder: Path) -> dict[str, Any]:
    """A folder's ``golden.json``."""
    return json.loads((folder / "golden.json").read_text())
