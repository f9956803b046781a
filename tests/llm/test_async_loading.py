"""Loading beside an event loop: an engine that nobody wants any more is closed, whoever gave it up and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from pocketllm import AsyncLLM
from pocketllm.engine.engine import Engine
from tests.scripted import Vocabulary, arithmetic, scripted_engine

WAIT = 30.0


class SlowLoad:
    """A load that ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.engine: Engine | None = None

    def __call__(self) -> Engine:
        self.begun.set()
        assert self.go_on.wait(WAIT)
        self.engine = scripted_engine(arithmetic(Vocabulary()))
        return self.engine


@pytest.fixture
def load() -> Iterator[SlowLoad]:
    slow = SlowLoad()
    yield slow
    slow.go_on.set()
    if slow.engine is not None:
        slow.engine.close()


def waiting_for(load: SlowLoad) -> AsyncLLM:
    llm = AsyncLLM("none")
    llm._load = load
    return llm


def test_closing_while_it_loads_closes_what_was_loaded(load: SlowLoad) -> None:
    async def run() -> str:
        llm = waiting_for(load)
        starting = asyncio.ensure_future(llm.start())
        await asyncio.to_thread(load.begun.wait, WAIT)
        closing = asyncio.ensure_future(llm.close())
        await asyncio.sleep(0)
        load.go_on.set()
        await asyncio.gather(starting, closing)
        return repr(llm)

    assert "closed" in asyncio.run(run())
    assert load.engine is not None
    assert not load.engine.statistics().alive


def test_a_load_that_is_cancelled_is_closed_when_it_ends(load: SlowLoad) -> None:
    async def run() -> None:
        starting = asyncio.ensure_future(waiting_for(load).start())
        await asyncio.to_thread(load.begun.wait, WAIT)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        load.go_on.set()

    asyncio.run(run())  # its end waits for the worker thread
    assert load.engine is not None
    assert not load.engine.statistics().alive
