"""The asynchronous offline API: the same answers, an event loop that stays free, and tasks that can be cancelled."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from pocketllm.async_llm import AsyncLLM
from pocketllm.errors import EngineDeadError, EngineError, InvalidRequestError
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams
from tests.llm.steps import step_sizes
from tests.scripted import Vocabulary, arithmetic, scripted_engine
from tests.served import Gate, eventually

SHORT = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=900)
MESSAGES = [{"role": "user", "content": "Hi"}]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 20))


@pytest.fixture
def engine(make_engine):
    return make_engine(arithmetic(Vocabulary()))


@pytest.fixture
def endless(make_engine):
    return make_engine(lambda context: 65)


def public_methods(owner: type) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(owner, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}


def test_every_entry_point_is_mirrored() -> None:
    mirrored = public_methods(AsyncLLM)
    del mirrored["start"]
    assert mirrored.keys() == public_methods(LLM).keys()
    for name, signature in public_methods(LLM).items():
        assert mirrored[name].parameters == signature.parameters, name
    assert inspect.signature(AsyncLLM).parameters == inspect.signature(LLM).parameters


def test_answers_are_those_of_the_synchronous_api(engine) -> None:
    async def main() -> None:
        llm, plain = AsyncLLM.over(engine), LLM.over(engine)
        prompts = ["abc", [1, 2], np.array([3])]
        outputs = [result.outputs for result in await llm.generate(prompts, SHORT)]
        assert outputs == [result.outputs for result in plain.generate(prompts, SHORT)]
        assert (await llm.chat(MESSAGES, SHORT))[0].outputs == plain.chat(MESSAGES, SHORT)[0].outputs
        scores = await llm.score(prompts, logprobs=1)
        assert [score.logprobs for score in scores] == [score.logprobs for score in plain.score(prompts, logprobs=1)]
        assert await llm.tokenize("a<|end|>") == plain.tokenize("a<|end|>")
        assert await llm.detokenize([97]) == "a"
        assert await llm.apply_template(MESSAGES) == plain.apply_template(MESSAGES)
        assert llm.capabilities is plain.capabilities
        streamed = [event.text async for event in llm.generate_stream("abc", SHORT)]
        assert "".join(streamed) == outputs[0][0].text
        streamed = [event.text async for event in llm.chat_stream(MESSAGES, SHORT)]
        assert "".join(streamed) == plain.chat(MESSAGES, SHORT)[0].text

    run(main())


def test_requests_of_several_tasks_share_their_steps(make_engine) -> None:
    gate = Gate()
    engine = make_engine(gate, max_sequences=4)
    sizes = step_sizes(engine)

    async def main() -> None:
        llm = AsyncLLM.over(engine)
        tasks = [asyncio.create_task(llm.generate([place + 1], SHORT)) for place in range(4)]
        while engine.statistics().requests_total < 4:
            await asyncio.sleep(0.01)  # the event loop stays free
        gate.opened.set()
        assert [results[0].text for results in await asyncio.gather(*tasks)] == ["a" * 5] * 4

    run(main())
    assert max(sizes) == 4


def test_a_list_longer_than_the_queue_is_done(make_engine) -> None:
    llm = AsyncLLM.over(make_engine(arithmetic(Vocabulary()), max_queue=3, max_sequences=2))
    prompts = [[1 + place % 250] for place in range(40)]
    results = run(llm.generate(prompts, SHORT))
    assert [list(result.prompt_token_ids) for result in results] == prompts


def is_free(engine) -> bool:
    statistics = engine.statistics()
    return statistics.kv_blocks_free == statistics.kv_blocks_total and statistics.completion_tokens_total < 900


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_cancelling_a_task_cancels_its_request(endless, method: str) -> None:
    async def main() -> None:
        llm = AsyncLLM.over(endless)
        task = asyncio.create_task(getattr(llm, method)("a" if method == "generate" else MESSAGES, LONG))
        while not endless.statistics().completion_tokens_total:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    eventually(lambda: is_free(endless))


@pytest.mark.parametrize("method", ["generate_stream", "chat_stream"])
@pytest.mark.parametrize("closing", [True, False])
def test_leaving_a_stream_cancels_its_request(endless, method: str, closing: bool) -> None:
    async def main() -> None:
        stream = getattr(AsyncLLM.over(endless), method)("a" if method == "generate_stream" else MESSAGES, LONG)
        if closing:
            async with aclosing(stream) as events:
                await anext(events)
            return
        async for _ in stream:
            break
        del stream
        while not is_free(endless):
            await asyncio.sleep(0.01)

    run(main())
    eventually(lambda: is_free(endless))


def test_cancelling_by_id(endless) -> None:
    async def main() -> None:
        llm = AsyncLLM.over(endless)
        stream = llm.generate_stream([[1]] * 30, LONG, request_id="mine")
        await anext(stream)
        assert await llm.cancel("mine")
        reasons = [event.finish_reason async for event in stream]
        assert [reason for reason in reasons if reason] == ["cancelled"] * 30
        assert not await llm.cancel("mine")

    run(main())


def test_an_event_loop_that_ends_first_leaves_the_engine_alive(endless) -> None:
    loop = asyncio.new_event_loop()
    stream = AsyncLLM.over(endless).generate_stream("a", LONG)
    loop.run_until_complete(anext(stream))  # type: ignore[arg-type]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    eventually(lambda: is_free(endless))
    assert endless.statistics().alive


def test_errors_arrive(make_engine) -> None:
    def script(context: tuple[int, ...]) -> int:
        if 200 in context:
            raise RuntimeError("a kernel broke")
        return 65

    async def main() -> None:
        llm = AsyncLLM.over(make_engine(script))
        with pytest.raises(EngineError, match="a kernel broke"):
            await llm.generate([[1], [200]], SHORT)
        with pytest.raises(TypeError, match="prompts is None"):
            await llm.generate(None)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await anext(llm.generate_stream([[]]))
        with pytest.raises(TypeError, match="'temperature' says how a reply is drawn"):
            await llm.chat(MESSAGES, temperature=0)

    run(main())


def test_before_loading_and_after_closing(engine) -> None:
    async def main() -> None:
        llm = AsyncLLM("any")
        assert repr(llm) == "<AsyncLLM, not loaded>"
        with pytest.raises(EngineDeadError, match="not loaded: use it in `async with`"):
            await llm.generate("a")
        async with AsyncLLM.over(engine) as llm:
            assert repr(llm).startswith("<AsyncLLM scripted on null")
        await llm.close()
        assert repr(llm) == "<AsyncLLM, closed>"
        for use in (llm.generate("a"), llm.chat(MESSAGES), llm.score("a"), llm.tokenize("a"), llm.cancel("a")):
            with pytest.raises(EngineDeadError, match="this AsyncLLM is closed"):
                await use
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(llm.generate_stream("a"))

    run(main())


def test_arguments_are_checked_before_loading() -> None:
    with pytest.raises(TypeError, match="AsyncLLM takes no argument 'bakend': did you mean 'backend'"):
        AsyncLLM("any", bakend="torch")


class Loader:
    """Stands in for loading a model; waits until it may go on."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Event(), threading.Event()
        self.engine: Any = None

    def __call__(self, args: object, progress: object) -> Any:
        self.started.set()
        assert self.go_on.wait(10)
        self.engine = scripted_engine(lambda context: 65)
        return self.engine


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr("pocketllm.async_llm.load_engine", loader)
    return loader


def test_loading_leaves_the_event_loop_free(loader: Loader) -> None:
    async def main() -> None:
        llm = AsyncLLM("any")
        starts = [asyncio.create_task(llm.start()) for _ in range(2)]
        while not loader.started.is_set():
            await asyncio.sleep(0.01)
        loader.go_on.set()
        await asyncio.gather(*starts)
        assert (await llm.generate("a", SHORT))[0].text == "A" * 5
        await llm.close()
        assert not loader.engine.statistics().alive

    run(main())


def test_a_load_that_is_cancelled_is_closed(loader: Loader) -> None:
    async def main() -> None:
        start = asyncio.create_task(AsyncLLM("any").start())
        while not loader.started.is_set():
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        loader.go_on.set()
        while loader.engine is None or loader.engine.statistics().alive:
            await asyncio.sleep(0.01)

    run(main())
