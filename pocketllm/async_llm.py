"""The offline API for asyncio: the same calls, awaited."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from pocketllm.config import EngineArgs
from pocketllm.engine.arguments import IdArray, Prompts
from pocketllm.engine.calls import Call, Calls
from pocketllm.engine.engine import Engine
from pocketllm.engine.loading import load_engine
from pocketllm.engine.request import RequestHandle
from pocketllm.errors import EngineDeadError
from pocketllm.llm import described, engine_args
from pocketllm.progress import LoadingBar, PromptsBar
from pocketllm.types import Capabilities, Message, RequestOutput, SamplingParams, ScoreOutput, TokenEvent


class AsyncLLM:
    """`pocketllm.LLM` for asyncio; arguments, results and errors are the same.

    ``async with AsyncLLM("smollm2") as llm`` loads the model, or `start` does; both leave the event loop free, and so
    do tokenizing, rendering and closing. Requests of several tasks are batched together by the engine; there is no
    scheduler here. Cancelling a task cancels its request, and so does leaving an ``async for`` early.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineArgs | None = None,
        /,
        *,
        progress: bool | None = None,
        **arguments: Any,
    ) -> None:
        args = engine_args("AsyncLLM", model, arguments)
        self._load: Callable[[], Engine] = partial(_load, args, progress)
        self._progress = progress
        self._calls: Calls | None = None
        self._closed = False
        self._starting = asyncio.Lock()

    @classmethod
    def over(cls, engine: Engine) -> AsyncLLM:
        """An AsyncLLM over an engine that runs already."""
        llm = cls()
        llm._calls = Calls(engine)
        return llm

    async def start(self) -> None:
        """Load the model, unless it is loaded. A load that is cancelled is closed as soon as it has ended."""
        async with self._starting:
            if self._calls is not None or self._closed:
                return
            loading = _Loading(self._load)
            try:
                engine = await asyncio.to_thread(loading.run)
            except asyncio.CancelledError:
                loading.abandon()
                raise
            if self._closed:
                await asyncio.to_thread(engine.close)
                return
            self._calls = Calls(engine)
            weakref.finalize(self, engine.close)  # for one that is forgotten without being closed

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do with this model."""
        return self._live.engine.capabilities

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        call = await asyncio.to_thread(
            self._live.generate, prompts, sampling_params, request_id=request_id, add_special_tokens=add_special_tokens
        )
        await self._run(call, progress)
        return call.outputs()

    async def generate_stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[TokenEvent, None]:
        """See `LLM.generate_stream`; errors of the arguments, too, come with the first event."""
        call = await asyncio.to_thread(
            self._live.generate, prompts, sampling_params, request_id=request_id, add_special_tokens=add_special_tokens
        )
        async with aclosing(_events(call)) as events:
            async for event in events:
                yield event

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """See `LLM.chat`."""
        call = await asyncio.to_thread(
            self._live.chat, messages, sampling_params, request_id=request_id, variables=template_variables
        )
        await self._run(call, False)
        return call.outputs()

    async def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> AsyncGenerator[TokenEvent, None]:
        """See `LLM.chat_stream`; errors of the arguments, too, come with the first event."""
        call = await asyncio.to_thread(
            self._live.chat, messages, sampling_params, request_id=request_id, variables=template_variables
        )
        async with aclosing(_events(call)) as events:
            async for event in events:
                yield event

    async def score(
        self,
        prompts: Prompts,
        *,
        logprobs: int = 0,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        progress: bool | None = None,
    ) -> list[ScoreOutput]:
        """See `LLM.score`."""
        call = await asyncio.to_thread(
            self._live.score, prompts, logprobs=logprobs, request_id=request_id, add_special_tokens=add_special_tokens
        )
        await self._run(call, progress)
        return call.scores()

    async def cancel(self, request_id: str) -> bool:
        """See `LLM.cancel`."""
        return self._live.cancel(request_id)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `LLM.tokenize`."""
        return await asyncio.to_thread(self._live.encode, text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int] | IdArray) -> str:
        """See `LLM.detokenize`."""
        return await asyncio.to_thread(self._live.decode, token_ids)

    async def apply_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_variables: Any
    ) -> str:
        """See `LLM.apply_template`."""
        return await asyncio.to_thread(
            self._live.chat_text, messages, add_generation_prompt=add_generation_prompt, variables=template_variables
        )

    async def close(self) -> None:
        """Cancel what runs and give the memory back. Closing twice does nothing; a load that runs is waited for."""
        self._closed = True
        async with self._starting:
            calls, self._calls = self._calls, None
        if calls is not None:
            await asyncio.to_thread(calls.engine.close)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        if self._calls is None and not self._closed:
            return "<AsyncLLM, not loaded>"
        return described("AsyncLLM", self._calls)

    @property
    def _live(self) -> Calls:
        if self._closed:
            raise EngineDeadError("this AsyncLLM is closed: make a new one")
        if self._calls is None:
            raise EngineDeadError("this AsyncLLM is not loaded: use it in `async with`, or await its start() before")
        return self._calls

    async def _run(self, call: Call, progress: bool | None) -> None:
        with PromptsBar(len(call), self._progress if progress is None else progress) as bar:
            async for event in _events(call):
                bar.add(event, call.finished)


def _load(args: EngineArgs, progress: bool | None) -> Engine:
    with LoadingBar(progress) as bar:
        return load_engine(args, bar)


class _Loading:
    """A load in a worker thread that may be given up while it runs; the thread itself closes what nobody wants."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._abandoned = False
        self._engine: Engine | None = None

    def run(self) -> Engine:
        """Load; an engine that was abandoned meanwhile is closed before it is returned."""
        engine = self._load()
        with self._lock:
            self._engine = engine
            abandoned = self._abandoned
        if abandoned:
            engine.close()
        return engine

    def abandon(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._abandoned = True
            engine = self._engine
        if engine is not None:
            threading.Thread(target=engine.close, name="pocketllm-closing").start()


async def _events(call: Call) -> AsyncGenerator[TokenEvent, None]:
    """What `Call.events` gives, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[RequestHandle] = asyncio.Queue()

    def tell(handle: RequestHandle) -> None:
        try:
            loop.call_soon_threadsafe(ready.put_nowait, handle)
        except RuntimeError:  # the loop is closed, so nobody reads any more
            handle.cancel()

    try:
        call.start(tell)
        while not call.done:
            event = call.take(await ready.get())
            if event is not None:
                yield event
    finally:
        call.abandon()
