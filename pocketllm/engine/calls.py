"""Calls of the offline API: the requests of one call, and the calls that run on one engine."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pocketllm.engine.arguments import (
    Params,
    conversation,
    params_for,
    prompt_list,
    request_ids,
    template_variables,
    token_id_list,
)
from pocketllm.engine.engine import Engine
from pocketllm.engine.request import RequestHandle
from pocketllm.errors import EngineError, InvalidRequestError, QueueFullError
from pocketllm.types import Message, RequestOutput, SamplingParams, ScoreOutput, TokenEvent

LEAD = 2
"""Prompts of a call that are with the engine at a time, per sequence of a step: those that run, and the next ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call.

    Attributes:
        prompt_token_ids: what is run.
        params: how its replies are drawn.
        request_id: by which it can be cancelled, or None.
        scored: whether its own tokens are scored and nothing is drawn.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str | None
    scored: bool = False


class Call:
    """The requests of one call.

    They are checked when the call is made, and submitted little by little once it starts: a list of any length neither
    fills the engine's queue nor keeps others waiting until all of it is done.

    One thread, or one event loop, owns a call: it starts it, takes its events and abandons it. `cancel` may come from
    any thread.
    """

    def __init__(self, engine: Engine, jobs: list[Job], call_id: str | None, active: dict[str, Call]) -> None:
        for job in jobs:
            engine.check_request(job.prompt_token_ids, job.params, prefill_only=job.scored)
        self.handles: list[RequestHandle] = []
        self.finished = 0
        self._engine = engine
        self._jobs = jobs
        self._id = call_id
        self._active = active
        self._open: set[RequestHandle] = set()
        self._most_open = LEAD * engine.capabilities.max_sequences
        self._cancelled = False
        self._ready: Callable[[RequestHandle], None] = lambda handle: None

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def done(self) -> bool:
        """Whether every event of every prompt was taken."""
        return self.finished == len(self._jobs)

    def start(self, ready: Callable[[RequestHandle], None]) -> None:
        """Submit the first prompts.

        Args:
            ready: called from the engine's thread with a handle for each event that it has; it must not block.

        Raises:
            InvalidRequestError: the call's id, or that of one of its prompts, belongs to an active request.
            QueueFullError, EngineDeadError: see `Engine.submit`.
        """
        if self._id is not None and self._active.setdefault(self._id, self) is not self:
            raise InvalidRequestError(
                f"request id {self._id!r} belongs to a call that is still active",
                param="request_id",
                code="request_id_active",
            )
        self._ready = ready
        self._submit()

    def take(self, handle: RequestHandle) -> TokenEvent | None:
        """The next event of a handle that is ready, and further prompts to the engine as this one ends.

        Raises:
            EngineError: the request failed.
        """
        event = handle.next_event()
        if handle.done:
            self._open.remove(handle)
            self.finished += 1
            self._submit()
        return event

    def events(self) -> Iterator[TokenEvent]:
        """Start, and give every event of every prompt as they come. Leaving early cancels what is left."""
        ready: queue.SimpleQueue[RequestHandle] = queue.SimpleQueue()
        try:
            self.start(ready.put)
            while not self.done:
                event = self.take(ready.get())
                if event is not None:
                    yield event
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Cancel what is left; to be called when the call has ended, in whichever way."""
        if self._id is not None and self._active.get(self._id) is self:
            del self._active[self._id]
        for handle in self._open:
            handle.cancel()

    def cancel(self) -> bool:
        """End every prompt at the next step, those that are not submitted yet too; False when all have ended."""
        self._cancelled = True
        waits = len(self.handles) < len(self._jobs)
        running = [handle.cancel() for handle in tuple(self.handles)]
        return waits or any(running)

    def outputs(self) -> list[RequestOutput]:
        """One result for each prompt, in their order."""
        return [handle.output() for handle in self.handles]

    def scores(self) -> list[ScoreOutput]:
        """One score for each prompt, in their order; EngineError when one was cancelled: half a score says nothing."""
        return [self._score(output) for output in self.outputs()]

    def _score(self, output: RequestOutput) -> ScoreOutput:
        if output.finish_reason == "cancelled":
            raise EngineError(f"request {output.request_id} was cancelled before its whole prompt was scored")
        tokens = tuple(map(self._engine.tokenizer.token_bytes, output.prompt_token_ids))
        return ScoreOutput(output.request_id, output.prompt_token_ids, tokens, output.prompt_logprobs or ())

    def _submit(self) -> None:
        while len(self.handles) < len(self._jobs) and len(self._open) < self._most_open:
            job = self._jobs[len(self.handles)]
            try:
                handle = self._engine.submit(
                    job.prompt_token_ids,
                    job.params,
                    request_id=job.request_id,
                    prompt_index=len(self.handles),
                    prefill_only=job.scored,
                    prompt_logprobs=job.scored,
                )
            except QueueFullError:
                if not self._open:
                    raise
                return  # others filled the queue: go on when a prompt of ours has ended
            self.handles.append(handle)
            self._open.add(handle)
            handle.notify(partial(self._ready, handle))
            if self._cancelled:
                handle.cancel()


class Calls:
    """Makes calls out of what callers give, and finds those that run by their id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._active: dict[str, Call] = {}

    def generate(self, prompts: object, params: Params, *, request_id: str | None, add_special_tokens: bool) -> Call:
        """Prompts to be completed."""
        return self._call(self._encode(prompts, add_special_tokens), params, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        *,
        request_id: str | None,
        variables: Mapping[str, Any],
    ) -> Call:
        """A conversation to be answered."""
        checked = template_variables(self.engine.template, variables)
        token_ids = self.engine.render_chat(conversation(messages), template_variables=checked)
        return self._call([token_ids], params, request_id)

    def score(self, prompts: object, *, logprobs: int, request_id: str | None, add_special_tokens: bool) -> Call:
        """Prompts to be scored."""
        params = SamplingParams(logprobs=logprobs)
        return self._call(self._encode(prompts, add_special_tokens), params, request_id, scored=True)

    def chat_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The text of a conversation's prompt."""
        checked = template_variables(self.engine.template, variables)
        prompt = self.engine.chat_prompt(
            conversation(messages), add_generation_prompt=add_generation_prompt, template_variables=checked
        )
        return prompt.text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        if not isinstance(text, str):
            raise TypeError(f"text is {text!r}: give a string")
        return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: object) -> str:
        """The text of token ids."""
        return self.engine.tokenizer.decode(self.engine.encode_prompt(token_id_list(token_ids)))

    def cancel(self, request_id: str) -> bool:
        """End a call, or one prompt of it, by its id."""
        call = self._active.get(request_id)
        return self.engine.cancel(request_id) if call is None else call.cancel()

    def _encode(self, prompts: object, add_special_tokens: bool) -> list[list[int]]:
        return [self.engine.encode_prompt(p, add_special_tokens=add_special_tokens) for p in prompt_list(prompts)]

    def _call(self, prompts: list[list[int]], params: Params, request_id: str | None, *, scored: bool = False) -> Call:
        given = zip(prompts, params_for(len(prompts), params), request_ids(len(prompts), request_id), strict=True)
        return Call(self.engine, [Job(*job, scored) for job in given], request_id, self._active)
