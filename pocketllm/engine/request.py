"""A submitted request as its caller holds it: events while it runs, a result when it is done."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from pocketllm.errors import EngineError
from pocketllm.types import CompletionOutput, RequestOutput, TokenEvent, TokenLogprob, Usage

logger = logging.getLogger(__name__)


class RequestHandle:
    """One prompt's request, with all its choices.

    The engine thread puts events in; any one thread takes them out, by `next_event`, `events` or `result`.

    Attributes:
        request_id: by which it can be cancelled.
        prompt_token_ids: the prompt.
        seed: the seed, given or drawn.
        n: how many choices it has.
        cached_tokens: how many of the prompt's tokens were found in the cache when its first choice was admitted; None
            until then.
        submitted_at: `time.monotonic` at submission, in seconds.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        *,
        seed: int,
        n: int,
        cancel: Callable[[RequestHandle], bool],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.seed = seed
        self.n = n
        self.cached_tokens: int | None = None
        self.submitted_at = time.monotonic()
        self._cancel = cancel
        self._events: queue.SimpleQueue[TokenEvent | EngineError] = queue.SimpleQueue()
        self._choices = [_Choice() for _ in range(n)]
        self._open = n
        self._notify: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def put(self, event: TokenEvent | EngineError) -> None:
        """For the engine thread: hand an event, or the error that ends the request, to the caller."""
        with self._lock:
            self._events.put(event)
            notify = self._notify
        if notify is not None:
            try:
                notify()
            except Exception:  # a reader's fault must not reach the engine, and with it every other reader
                logger.exception("the reader of request %s could not be told", self.request_id)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` once for every event, those that are there already included, from whichever thread."""
        with self._lock:
            self._notify = callback
            pending = self._events.qsize()
        for _ in range(pending):
            callback()

    @property
    def done(self) -> bool:
        """Whether every choice's last event was taken."""
        return self._open == 0

    def next_event(self, timeout: float | None = None) -> TokenEvent | None:
        """The next event of any choice; None when none came within `timeout` seconds.

        Raises:
            EngineError: the request failed, or is finished (ask `done` before).
        """
        if self.done:
            raise EngineError(f"request {self.request_id} is finished: no further event will come")
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, EngineError):
            self._open = 0
            raise event
        self._choices[event.index].add(event)
        if event.finish_reason is not None:
            self._open -= 1
        return event

    def events(self) -> Iterator[TokenEvent]:
        """Every event up to the last; EngineError when the request fails. Leaving early cancels the request."""
        try:
            while not self.done:
                event = self.next_event()
                if event is not None:
                    yield event
        finally:
            if not self.done:
                self.cancel()

    def result(self) -> RequestOutput:
        """Wait for every choice and give the whole result; EngineError when the request fails."""
        for _ in self.events():
            pass
        return self.output()

    def output(self) -> RequestOutput:
        """What has been taken out so far as a result; whole once `done`."""
        outputs = tuple(choice.output(index) for index, choice in enumerate(self._choices))
        completion = sum(output.completion_tokens for output in outputs)
        usage = Usage(len(self.prompt_token_ids), completion, self.cached_tokens or 0)
        scored = next((c.prompt_logprobs for c in self._choices if c.prompt_logprobs is not None), None)
        return RequestOutput(self.request_id, self.prompt_token_ids, outputs, self.seed, usage, scored)

    def cancel(self) -> bool:
        """End the request at the next step; False when it is already finished."""
        return self._cancel(self)


class _Choice:
    """The events of one choice, put together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._end: TokenEvent | None = None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def add(self, event: TokenEvent) -> None:
        self._texts.append(event.text)
        self._token_ids += event.token_ids
        if event.logprobs is not None:
            self._logprobs = [] if self._logprobs is None else self._logprobs
            self._logprobs.extend(event.logprobs)
        if "prompt_logprobs" in event.metadata:
            self.prompt_logprobs = event.metadata["prompt_logprobs"]
        if event.finish_reason is not None:
            self._end = event

    def output(self, index: int) -> CompletionOutput:
        end = self._end
        facts = {} if end is None else end.metadata
        return CompletionOutput(
            index=index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason="cancelled" if end is None or end.finish_reason is None else end.finish_reason,
            stop_match=facts.get("stop_match"),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            completion_tokens=facts.get("completion_tokens", len(self._token_ids)),
            token_sha=facts.get("token_sha", ""),
            timing=facts.get("timing"),
        )
