from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.tiny import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint; see `tests.bench.tiny`."""
    return write_tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf")
