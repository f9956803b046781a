"""What tells cached entries apart: every fact that a runtime's bits may depend on changes its numerics id."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.kernels import registry
from pocketllm.models.family import family
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.registry import BACKENDS
from tests.models.test_against_transformers import save_tiny

PACKAGE = Path(registry.__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    save_tiny("llama", {}, made)
    return made


def numerics_id(folder: Path, *, backend: str = "torch", config_changes: Any = None, **options: Any) -> str:
    given = {"device": "cpu", "dtype": "float32", "block_size": 16} | options
    with open_checkpoint(folder) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        config = dataclasses.replace(config, **config_changes or {})
        runtime = BACKENDS[backend].load()(config, RuntimeOptions(**given))
        runtime.load(checkpoint, lambda *_: None)
    try:
        return runtime.numerics_id
    finally:
        runtime.close()


def test_the_same_again_is_the_same(folder: Path) -> None:
    assert numerics_id(folder) == numerics_id(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "numba"},
        {"device": "cpu:0"},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"config_changes": {"norm_eps": 1e-4}},
        {"overrides": {"rms_norm": registry.implementation("rms_norm", "torch")}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_setting_is_another(folder: Path, changes: dict[str, Any]) -> None:
    assert numerics_id(folder, **changes) != numerics_id(folder)


@pytest.mark.parametrize(
    "source",
    [
        "models/llama.py",
        "models/dense_decoder.py",
        "models/rotary.py",
        "runtimes/op_runtime.py",
        "runtimes/torch_runtime.py",
        "runtimes/torch_arrays.py",
        "runtimes/weights.py",
        "checkpoint/quant.py",
        "kernels/decoder_layer/spec.py",
        "kernels/mlp/spec.py",
        "kernels/rms_norm/impl_torch.py",
    ],
)
def test_another_source_is_another(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id(folder)
    read = Path.read_bytes
    changed = PACKAGE / source
    assert changed.is_file()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"# changed" if path == changed else b""))
    assert numerics_id(folder) != before


def test_another_build_of_what_computes_is_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id(folder)
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert numerics_id(folder) != before
