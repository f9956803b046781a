from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pocketllm.engine.engine import Engine
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState
from tests.scripted import Vocabulary, scripted_engine
from tests.served import Gate, Serve, running

ALPHABET = ["DEF", "GH", "I", "J", "K", "LM", "N"]
SMILEY = "\U0001f60a"
CHAT_PROMPT = "[user]x>"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves an engine (None: not loaded yet) with server arguments; gives the address, ends both after the test."""
    with ExitStack() as cleanup:

        def start(engine: Engine | None, **args: Any) -> str:
            state = ServerState(ServerArgs(port=0, **args), max_prompts=16)
            if engine is not None:
                cleanup.callback(engine.close)
                state.ready(engine)
            return cleanup.enter_context(running(state))

        yield start


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary([*ALPHABET, SMILEY.encode()[:3], SMILEY.encode()[3:]])


@pytest.fixture
def alphabet(serve: Serve, vocabulary: Vocabulary) -> str:
    """A server that answers the prompt ABC, and the chat of one letter, with the alphabet from D to N.

    Any other prompt gets smileys, two tokens each, until its budget is over.
    """
    letters = [*vocabulary.ids(*ALPHABET), vocabulary.end]
    smiley = vocabulary.ids(SMILEY.encode()[:3], SMILEY.encode()[3:])

    def script(context: tuple[int, ...]) -> int:
        for prompt in ("ABC", CHAT_PROMPT):
            if context[: len(prompt)] == tuple(prompt.encode()):
                return letters[len(context) - len(prompt)]
        return smiley[len(context) % 2]

    return serve(scripted_engine(script, vocabulary))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def slow() -> Callable[[tuple[int, ...]], int]:
    """A script that writes one letter for ever, a few hundred a second."""
    pace = threading.Event()

    def script(context: tuple[int, ...]) -> int:
        pace.wait(0.003)
        return ord("a")

    return script
