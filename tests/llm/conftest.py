"""LLMs over scripted engines, and a tiny model for those that load one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pocketllm.checkpoint.safetensors import SafetensorsCheckpoint
from pocketllm.engine.engine import Engine
from pocketllm.llm import LLM
from tests.models.test_against_transformers import save_tiny
from tests.scripted import scripted_engine

EngineMaker = Callable[..., Engine]


@pytest.fixture
def make_engine(request: pytest.FixtureRequest) -> EngineMaker:
    def make(*args, **kwargs) -> Engine:
        engine = scripted_engine(*args, **kwargs)
        request.addfinalizer(engine.close)
        return engine

    return make


@pytest.fixture
def make_llm(make_engine: EngineMaker) -> Callable[..., LLM]:
    return lambda *args, **kwargs: LLM.over(make_engine(*args, **kwargs))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", {}, folder)
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def checkpoint(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model; reading one of its tensors fails the test."""

    def read(self: SafetensorsCheckpoint, name: str) -> Any:
        raise AssertionError(f"weight {name} is read")

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", read)
    return tiny
