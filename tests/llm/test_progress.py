"""Progress bars: where somebody sees them, for work that takes a while, and never uninvited."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pocketllm.async_llm import AsyncLLM
from pocketllm.llm import LLM
from pocketllm.progress import LoadingBar
from pocketllm.types import SamplingParams

SHORT = SamplingParams(max_tokens=5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def shown_on(stream: io.StringIO | None) -> Iterator[None]:
    """Standard error is this stream, and no notebook. Not a fixture: pytest's own capture comes after those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "ipykernel", raising=False)
        patch.setattr(sys, "stderr", stream)
        yield


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def llm(make_llm) -> LLM:
    return make_llm(lambda context: 65)


def test_several_prompts_have_a_bar_on_a_terminal(llm: LLM, terminal: Terminal) -> None:
    with shown_on(terminal):
        llm.generate(["a", "b", "c"], SHORT)
    assert "3/3" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_scores_have_one_too(llm: LLM, terminal: Terminal) -> None:
    with shown_on(terminal):
        llm.score(["a", "b"])
    assert "2/2" in terminal.getvalue()


def test_so_has_the_asynchronous_api(llm: LLM, terminal: Terminal) -> None:
    with shown_on(terminal):
        asyncio.run(AsyncLLM.over(llm._live.engine).generate(["a", "b"], SHORT))
    assert "2/2" in terminal.getvalue()


def test_there_is_none_for_short_work_or_where_it_is_turned_off(llm: LLM, terminal: Terminal) -> None:
    with shown_on(terminal):
        llm.generate("a", SHORT)
        llm.chat([{"role": "user", "content": "a"}], SHORT)
        list(llm.generate_stream(["a", "b"], SHORT))
        llm.generate(["a", "b"], SHORT, progress=False)
        llm._progress = False
        llm.generate(["a", "b"], SHORT)
        assert terminal.getvalue() == ""
        llm.generate(["a", "b"], SHORT, progress=True)
    assert "2/2" in terminal.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_there_is_none_where_nobody_sees_it(llm: LLM, stream: io.StringIO | None) -> None:
    with shown_on(stream):
        llm.generate(["a", "b"], SHORT)
    assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize(("progress", "drawn"), [(None, True), (False, False)])
def test_loading(terminal: Terminal, progress: bool | None, drawn: bool) -> None:
    with shown_on(terminal), LoadingBar(progress) as bar:
        bar("weights", 0, 4)
        bar("weights", 4, 4)
    assert ("weights: " in terminal.getvalue()) == drawn
