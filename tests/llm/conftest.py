"""LLMs over scripted engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pocketllm.engine.engine import Engine
from pocketllm.llm import LLM
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
