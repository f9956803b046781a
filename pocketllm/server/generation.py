"""One HTTP request's work on the engine."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from pocketllm.protocol.errors import RequestTimeoutError
from pocketllm.protocol.openai.answer import Answer
from pocketllm.types import CompletionOutput, SamplingParams, TokenEvent, Usage

if TYPE_CHECKING:
    from pocketllm.engine.engine import Engine
    from pocketllm.engine.request import RequestHandle

POLL_SECONDS = 0.25
"""How often a silent request looks whether its client is still there."""


class ClientGoneError(Exception):
    """The client has closed its connection: nobody is left to answer."""


class Generation:
    """The prompts of one request, submitted together and read as one.

    Attributes:
        n: choices of each prompt.
        client_left: whether the client closed its connection before the end.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        prefill_only: bool,
        scores_prompt: bool,
        request_id: str,
        timeout: float | None,
        client_gone: Callable[[], bool],
    ) -> None:
        self.n = params.n
        self.client_left = False
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._prefill_only = prefill_only
        self._scores_prompt = scores_prompt
        self._request_id = request_id
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._client_gone = client_gone
        self._handles: list[RequestHandle] = []
        self._finished: set[int] = set()
        self._cancelled = False

    @property
    def choice_count(self) -> int:
        """Choices of all prompts."""
        return len(self._prompts) * self.n

    def submit(self) -> None:
        """Hand every prompt to the engine; close the generation also when this raises.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError: the engine refuses a prompt.
        """
        for index, prompt in enumerate(self._prompts):
            request_id = self._request_id if len(self._prompts) == 1 else f"{self._request_id}-{index}"
            self._handles.append(
                self._engine.submit(
                    prompt,
                    self._params,
                    request_id=request_id,
                    prompt_index=index,
                    prefill_only=self._prefill_only,
                    prompt_logprobs=self._scores_prompt,
                )
            )
        if self._cancelled:
            self.cancel()

    def events(self) -> Iterator[TokenEvent | None]:
        """Every choice's events as they come, and None now and then while none does.

        Raises:
            EngineError: the engine failed on one of the prompts.
            RequestTimeoutError: the time is over and choices are unfinished.
            ClientGoneError: the client closed its connection.
        """
        ready: queue.SimpleQueue[RequestHandle] = queue.SimpleQueue()
        for handle in self._handles:
            handle.notify(partial(ready.put, handle))
        unfinished = len(self._handles)
        while unfinished:
            event = None
            with suppress(queue.Empty):
                handle = ready.get(timeout=self._patience())
                event = handle.next_event(timeout=0)
                unfinished -= handle.done
            if event is not None and event.finish_reason is not None:
                self._finished.add(self.choice_index(event))
            yield event
            if unfinished:
                self._check_patience()

    @property
    def complete(self) -> bool:
        """Whether every choice is finished."""
        return len(self._finished) == self.choice_count

    def choice_index(self, event: TokenEvent) -> int:
        """Which of all prompts' choices an event belongs to."""
        return event.prompt_index * self.n + event.index

    def wait(self) -> Answer:
        """The answer once every choice is finished, or those that are when the time is over; raises as `events`."""
        try:
            for _ in self.events():
                pass
        except RequestTimeoutError:
            if not self._finished:
                raise
        return self.answer()

    def answer(self) -> Answer:
        """The finished choices."""
        outputs = [handle.output() for handle in self._handles]
        choices: list[tuple[int, CompletionOutput]] = [
            (position * self.n + choice.index, choice)
            for position, output in enumerate(outputs)
            for choice in output.outputs
            if position * self.n + choice.index in self._finished
        ]
        return Answer(outputs, self.n, choices)

    def usage(self) -> Usage:
        """Tokens taken so far."""
        return self.answer().usage

    def cancel(self) -> bool:
        """End all choices, from any thread; False when all have ended."""
        self._cancelled = True
        cancelled = [handle.cancel() for handle in tuple(self._handles)]
        return any(cancelled) or len(self._handles) < len(self._prompts)

    def close(self) -> None:
        """Leave nothing running."""
        if not all(handle.done for handle in self._handles):
            self.cancel()

    def _patience(self) -> float:
        """Seconds to wait for an event before looking up."""
        if self._deadline is None:
            return POLL_SECONDS
        return max(0.0, min(POLL_SECONDS, self._deadline - time.monotonic()))

    def _check_patience(self) -> None:
        if self._client_gone():
            self.client_left = True
            raise ClientGoneError
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise RequestTimeoutError(f"The request did not finish within {self._timeout:g} seconds.")
