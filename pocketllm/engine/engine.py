"""The engine: one thread owns the runtime; callers submit requests and read their events."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm import env
from pocketllm.checkpoint.special_tokens import RenderedPrompt
from pocketllm.checkpoint.template import ChatTemplate
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.executor import Drawn, Executor
from pocketllm.engine.prompts import chat_prompt, infill_prompt, raw_prompt
from pocketllm.engine.reply import Reply
from pocketllm.engine.request import RequestHandle
from pocketllm.engine.request_checks import RequestChecks
from pocketllm.engine.sampler import SamplingDefaults, resolve
from pocketllm.engine.scheduler import Plan, Scheduler
from pocketllm.engine.sequence import Sequence as TokenSequence
from pocketllm.engine.sequence import choice_seed, distinct, own_seed
from pocketllm.errors import EngineDeadError, EngineError, InvalidRequestError, QueueFullError
from pocketllm.models.family import ModelConfig
from pocketllm.runtimes.base import Runtime
from pocketllm.types import Capabilities, Message, SamplingParams

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
CLOSING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A reading of the engine; totals only grow.

    Attributes:
        alive: whether it can serve.
        error: why it cannot, or None.
        running, waiting: sequences in the step, and those that wait for a place.
        requests_total: requests accepted.
        prompt_tokens_total, completion_tokens_total: tokens of prompts accepted, and of replies drawn.
        cached_tokens_total: tokens of prompts that were found in the cache.
        preemptions_total: sequences that gave their blocks back and went on later.
        kv_blocks_total, kv_blocks_free: blocks of the KV cache, and those that no sequence holds.
    """

    alive: bool
    error: str | None
    running: int
    waiting: int
    requests_total: int
    prompt_tokens_total: int
    completion_tokens_total: int
    cached_tokens_total: int
    preemptions_total: int
    kv_blocks_total: int
    kv_blocks_free: int


class Engine:
    """Serves one model.

    Attributes:
        model_id: the name under which the model is served.
        created: when it was loaded, in Unix seconds.
        capabilities: what it can do.
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        template: the model's chat template.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        capabilities: Capabilities,
        scheduler: Scheduler,
        end_ids: frozenset[int],
        defaults: SamplingDefaults,
        model_id: str,
        max_queue: int,
        step_timeout: float = 300.0,
    ) -> None:
        self.model_id = model_id
        self.created = int(time.time())
        self.capabilities = capabilities
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self._runtime = runtime
        self._executor = Executor(runtime, tokenizer, scheduler.cache.block_size)
        self._scheduler = scheduler
        self._checks = RequestChecks(
            window=capabilities.max_model_len,
            vocab_size=config.vocab_size,
            longest_token=tokenizer.longest_token,
            end_ids=end_ids,
        )
        self._defaults = defaults
        self._max_queue = max_queue
        self._step_timeout = step_timeout
        self._arrivals = itertools.count()
        self._process = os.getpid()
        self._lock = threading.Condition()
        # All below is guarded by the lock; the scheduler and the runtime belong to the engine's thread alone.
        self._inbox: deque[TokenSequence] = deque()
        self._active: dict[str, list[TokenSequence]] = {}
        self._cancelled: list[list[TokenSequence]] = []
        self._closing = False
        self._error: str | None = None
        self._step_began: float | None = None
        self._requests_total = 0
        self._prompt_tokens_total = 0
        self._completion_tokens_total = 0
        self._thread = threading.Thread(target=self._run, name="pocketllm-engine", daemon=True)
        self._thread.start()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watch_steps, name="pocketllm-watch", daemon=True)
        self._watch.start()
        atexit.register(self.close)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a conversation, rendered by the checkpoint's template.

        Args:
            messages: OpenAI's shape; they are not changed.
            add_generation_prompt: whether the prompt ends with the opening of an assistant turn.
            continue_final_message: end with the last message's text instead, as the beginning of the reply.
            template_variables: further variables of the template's own, such as ``enable_thinking``.

        Raises:
            TemplateError: the template refuses the conversation.
            InvalidRequestError: a message is malformed.
        """
        return chat_prompt(
            self.template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_variables or {},
            special_tokens=self.tokenizer.special_tokens,
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of `chat_prompt`. Message contents never turn into special tokens."""
        prompt = self.chat_prompt(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_variables=template_variables,
        )
        self._checks.check_size(prompt.text)
        return self.tokenizer.encode_chat(prompt)

    def encode_prompt(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a raw prompt: special tokens in a text are parsed; ids are taken as given.

        Raises:
            InvalidRequestError: an id is outside the vocabulary.
        """
        self._checks.check_size(prompt)
        return raw_prompt(
            self.tokenizer, prompt, vocab_size=self.config.vocab_size, add_special_tokens=add_special_tokens
        )

    def encode_infill(self, prompt: str | Sequence[int], suffix: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids that ask for what belongs between `prompt` and `suffix`, neither of them parsed.

        Raises:
            InvalidRequestError: the tokenizer has no fill-in-the-middle tokens; an id is outside the vocabulary.
        """
        self._checks.check_size(prompt, suffix)
        return infill_prompt(
            self.tokenizer,
            prompt,
            suffix,
            vocab_size=self.config.vocab_size,
            add_special_tokens=add_special_tokens,
        )

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt_index: int = 0,
        prefill_only: bool = False,
        prompt_logprobs: bool = False,
    ) -> RequestHandle:
        """Queue a request; it starts at the next step that has room.

        Args:
            prompt_token_ids: what is run.
            params: how the replies are drawn. Without a seed one is drawn, or derived from the prompt where the
                environment has a ``POCKETLLM_SEED_SALT``; the handle tells it.
            request_id: by which it can be cancelled; one is made where none is given.
            prompt_index: which prompt of the caller's it is, for its events.
            prefill_only: compute the prompt and draw nothing, whatever the params say.
            prompt_logprobs: report the log probability of each of the prompt's tokens too, with as many of the
                likeliest beside it as ``params.logprobs`` says.

        Raises:
            InvalidRequestError: the prompt is empty, or it and its reply cannot fit the window; a biased token id is
                outside the vocabulary; `request_id` belongs to an active request (code ``request_id_active``).
            QueueFullError: too many requests wait.
            EngineDeadError: the engine can serve no more.
        """
        prompt = tuple(prompt_token_ids)
        budget = self.check_request(prompt, params, prefill_only=prefill_only)
        seed = own_seed(prompt, env.SEED_SALT.read()) if params.seed is None else params.seed
        handle = RequestHandle(
            request_id or f"req-{secrets.token_hex(12)}", prompt, seed=seed, n=params.n, cancel=self._cancel_handle
        )
        sampling = resolve(params, self._defaults)
        # What takes long with a long prompt is done here, once: no step waits for it.
        block_keys = self._scheduler.cache.prompt_keys(prompt, budget) if params.cache_prompt else []
        seen = distinct(prompt) if sampling.repetition_penalty != 1.0 else None
        end_ids = self._checks.ends(params)
        sequences = [
            TokenSequence(
                handle=handle,
                index=index,
                prompt_index=prompt_index,
                arrival=next(self._arrivals),
                tokens=list(prompt),
                prompt_length=len(prompt),
                sampling=sampling,
                seed=choice_seed(seed, index),
                budget=budget,
                end_ids=end_ids,
                reply=Reply(self.tokenizer, params.stop),
                top_logprobs=params.logprobs,
                prompt_logprobs=[None] if prompt_logprobs else None,
                shares_prefix=params.cache_prompt,
                block_keys=list(block_keys),
                seen=seen,
            )
            for index in range(params.n)
        ]
        self._enqueue(handle, sequences)
        return handle

    def check_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prefill_only: bool = False
    ) -> int:
        """The tokens that a reply may have; the errors are those of `submit` that the request alone decides."""
        return self._checks.reply_budget(prompt_token_ids, params, prefill_only=prefill_only)

    def _enqueue(self, handle: RequestHandle, sequences: list[TokenSequence]) -> None:
        if os.getpid() != self._process:
            raise EngineDeadError(
                "the engine runs in the process that loaded it, and this is a fork of that: start processes with "
                "multiprocessing's method 'spawn', and load the model there"
            )
        with self._lock:
            if self._error is not None or self._closing:
                raise EngineDeadError(f"the engine serves no more: {self._error or 'it is closed'}")
            if handle.request_id in self._active:
                raise InvalidRequestError(
                    f"request id {handle.request_id!r} belongs to a request that is still active",
                    param="request_id",
                    code="request_id_active",
                )
            if self._waiting_choices() >= self._max_queue:
                raise QueueFullError(f"{self._max_queue} requests wait already, as many as may: try later")
            self._active[handle.request_id] = sequences
            self._inbox.extend(sequences)
            self._requests_total += 1
            self._prompt_tokens_total += len(handle.prompt_token_ids)
            self._lock.notify()

    def _waiting_choices(self) -> int:
        """Choices for which the next step has no place."""
        choices = [s for group in self._active.values() for s in group if not s.finished]
        running = sum(1 for sequence in choices if sequence.blocks)
        return len(choices) - max(self.capabilities.max_sequences, running)

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step, every choice of it; False when no such request is active.

        Its id is free at once.
        """
        with self._lock:
            return self._cancel_group(self._active.get(request_id))

    def _cancel_handle(self, handle: RequestHandle) -> bool:
        """The same for this very request: by now another one may have its id."""
        with self._lock:
            group = self._active.get(handle.request_id)
            return self._cancel_group(group if group and group[0].handle is handle else None)

    def _cancel_group(self, group: list[TokenSequence] | None) -> bool:
        if group is None:
            return False
        del self._active[group[0].handle.request_id]
        self._cancelled.append(group)
        self._lock.notify()
        return True

    def _groups(self) -> list[list[TokenSequence]]:
        """The choices of every request whose reader still waits for an end."""
        return [*self._active.values(), *self._cancelled]

    def statistics(self) -> EngineStatistics:
        """A reading of the engine, from any thread."""
        with self._lock:
            unfinished = [s for group in self._groups() for s in group if not s.finished]
            running = sum(1 for sequence in unfinished if sequence.blocks)
            return EngineStatistics(
                alive=self._error is None and not self._closing,
                error=self._error,
                running=running,
                waiting=len(unfinished) - running,
                requests_total=self._requests_total,
                prompt_tokens_total=self._prompt_tokens_total,
                completion_tokens_total=self._completion_tokens_total,
                cached_tokens_total=self._scheduler.cached_tokens,
                preemptions_total=self._scheduler.preemptions,
                kv_blocks_total=self._scheduler.cache.blocks.total,
                kv_blocks_free=self._scheduler.cache.blocks.free,
            )

    def close(self) -> None:
        """Cancel what runs, end the threads and free the runtime. Closing twice does nothing.

        A step is waited for `CLOSING_SECONDS`. One that hangs longer is left to the process's end, and those who wait
        for it get an error.
        """
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
            self._lock.notify()
        own = threading.current_thread()
        if own is not self._thread:
            self._thread.join(timeout=CLOSING_SECONDS)
            if self._thread.is_alive():
                self._die("it was closed while a step hung")
        self._over.set()
        if own is not self._watch:
            self._watch.join()

    def _watch_steps(self) -> None:
        """Declare the engine dead when a step does not come back: those who wait must not wait for ever."""
        while not self._over.wait(WATCH_SECONDS):
            began = self._step_began
            if began is not None and time.monotonic() - began > self._step_timeout:
                self._die(f"a step has not come back for {self._step_timeout:g} seconds")
                return

    def _run(self) -> None:
        try:
            while self._gather():
                self._step()
        except BaseException as error:  # whatever ends this thread must reach those who wait for it
            logger.exception("the engine's thread ended")
            self._die(f"{type(error).__name__}: {error}")
        finally:
            self._runtime.close()

    def _gather(self) -> bool:
        """Wait until there is a step to do, taking in new sequences and letting cancelled ones go; False at the end."""
        while True:
            with self._lock:
                while not (self._inbox or self._cancelled or self._over_now or any(self._scheduler)):
                    self._lock.wait()
                while self._inbox:
                    self._scheduler.add(self._inbox.popleft())
                groups = self._groups() if self._closing else self._cancelled
                ended = [sequence for group in groups for sequence in group if not sequence.finished]
                self._cancelled = []
                for sequence in ended:
                    sequence.finish("cancelled")
                self._retire(ended)
                over = self._over_now
                work = any(self._scheduler)
            _deliver(ended)
            if over:
                return False
            if work:
                return True

    @property
    def _over_now(self) -> bool:
        return self._closing or self._error is not None

    def _step(self) -> None:
        """Schedule, run, sample, commit. A step that fails ends the requests that took part in it, and no others."""
        plan = self._scheduler.plan()
        if not plan.work:
            raise AssertionError("sequences wait, and the scheduler finds nothing to do for them")
        for work in plan.work:
            work.sequence.start()
        started = self._step_began = time.monotonic()
        try:
            drawn = self._executor.run(plan)
        except Exception as error:  # a kernel may raise anything; its requests are told
            logger.exception("a step failed")
            failure = EngineError(f"the step that computed this request failed: {type(error).__name__}: {error}")
            self._settle(plan, {work.sequence.handle: failure for work in plan.work}, drawn=0)
            self._executor.check()  # what it raises ends this thread: no later step could succeed
        else:
            self._commit(plan, drawn)
        self._step_began = None
        self._scheduler.account(plan, time.monotonic() - started)

    def _commit(self, plan: Plan, drawn: list[Drawn]) -> None:
        tokens = dict(zip(plan.sampled, drawn, strict=True))
        undrawable = {sequence for sequence, token in tokens.items() if token.token_id < 0}
        for work in plan.work:
            if work.sequence in undrawable:
                continue  # what the step left of it may be no numbers, which nobody must find
            completes = work.completes
            self._scheduler.cache.commit(work.sequence, work.tokens)
            if completes and work.sequence.budget == 0:
                work.sequence.finish("length")
        failures = {}
        for sequence, token in tokens.items():
            error = self._accept(sequence, token)
            if error is not None:
                failures[sequence.handle] = error
        self._settle(plan, failures, drawn=len(tokens))

    def _settle(self, plan: Plan, failures: Mapping[RequestHandle, EngineError], *, drawn: int) -> None:
        """Retire what the step ended, then tell the readers: who has read a last event finds the blocks free."""
        touched = [work.sequence for work in plan.work]
        with self._lock:
            failed = [group for group in self._groups() if group[0].handle in failures]
            for sequence in (sequence for group in failed for sequence in group if not sequence.finished):
                sequence.abort()
                touched.append(sequence)
            self._completion_tokens_total += drawn
            self._retire(touched)
        _deliver([sequence for sequence in touched if sequence.handle not in failures])
        for handle, error in failures.items():
            handle.put(error)

    def _accept(self, sequence: TokenSequence, drawn: Drawn) -> EngineError | None:
        """Hand a drawn token on; what goes wrong here is the one request's error."""
        if drawn.token_id < 0:
            return EngineError("no next token can be drawn: the model's logits are not numbers, or none is allowed")
        try:
            sequence.accept(drawn.token_id, drawn.logprob)
        except Exception as error:
            logger.exception("request %s failed", sequence.handle.request_id)
            return EngineError(f"the request failed: {type(error).__name__}: {error}")
        return None

    def _retire(self, touched: Sequence[TokenSequence]) -> None:
        """Forget those of them that are finished; their blocks are free at once."""
        ended = {sequence for sequence in touched if sequence.finished}
        self._scheduler.drop(ended)
        for request_id in {sequence.handle.request_id for sequence in ended}:
            if all(sequence.finished for sequence in self._active.get(request_id, ())):
                self._active.pop(request_id, None)

    def _die(self, reason: str) -> None:
        with self._lock:
            self._error = self._error or reason
            groups = self._groups()
            self._active.clear()
            self._cancelled.clear()
            for sequence in (sequence for group in groups for sequence in group):
                sequence.abort()
            self._lock.notify()
        for group in groups:
            group[0].handle.put(EngineDeadError(f"the engine died: {reason}"))


def _deliver(sequences: Sequence[TokenSequence]) -> None:
    """Hand the sequences' news to their readers."""
    for sequence in sequences:
        for event in sequence.take_news():
            sequence.handle.put(event)
