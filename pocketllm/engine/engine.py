"""The engine: one thread owns the runtime; callers submit requests and read their events."""

from __future__ import annotations

import atexit
import itertools
import logging
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
from pocketllm.engine.sampler import SamplingDefaults, resolve
from pocketllm.engine.scheduler import Plan, Scheduler
from pocketllm.engine.sequence import Sequence as TokenSequence
from pocketllm.engine.sequence import choice_seed, own_seed
from pocketllm.errors import EngineDeadError, EngineError, InvalidRequestError, QueueFullError
from pocketllm.models.family import ModelConfig
from pocketllm.runtimes.base import Runtime
from pocketllm.types import Capabilities, Message, SamplingParams

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
CLOSING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A reading of the engine; totals only grow.

    Attributes:
        alive: whether it can serve.
        error: why it cannot, or None.
        running, waiting: sequences in the step, and those that wait for a place.
        requests_total: requests accepted.
        prompt_tokens_total, completion_tokens_total: tokens of prompts accepted, and of replies drawn.
        preemptions_total: sequences that gave their blocks back and were computed anew.
        kv_blocks_total, kv_blocks_free: blocks of the KV cache.
    """

    alive: bool
    error: str | None
    running: int
    waiting: int
    requests_total: int
    prompt_tokens_total: int
    completion_tokens_total: int
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
        self._executor = Executor(runtime, tokenizer)
        self._scheduler = scheduler
        self._end_ids = end_ids
        self._defaults = defaults
        self._max_queue = max_queue
        self._step_timeout = step_timeout
        self._arrivals = itertools.count()
        self._lock = threading.Condition()
        # All below is guarded by the lock; the scheduler and the runtime belong to the engine's thread alone.
        self._inbox: deque[TokenSequence] = deque()
        self._active: dict[str, list[TokenSequence]] = {}
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
        return self.tokenizer.encode_chat(
            self.chat_prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_variables=template_variables,
            )
        )

    def encode_prompt(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a raw prompt: special tokens in a text are parsed; ids are taken as given.

        Raises:
            InvalidRequestError: an id is outside the vocabulary.
        """
        return raw_prompt(
            self.tokenizer, prompt, vocab_size=self.config.vocab_size, add_special_tokens=add_special_tokens
        )

    def encode_infill(self, prompt: str | Sequence[int], suffix: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids that ask for what belongs between `prompt` and `suffix`, neither of them parsed.

        Raises:
            InvalidRequestError: the tokenizer has no fill-in-the-middle tokens; an id is outside the vocabulary.
        """
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
            request_id or f"req-{secrets.token_hex(12)}", prompt, seed=seed, n=params.n, cancel=self.cancel
        )
        sampling = resolve(params, self._defaults)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
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
            )
            for index in range(params.n)
        ]
        self._enqueue(handle, sequences)
        return handle

    def check_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, prefill_only: bool = False
    ) -> int:
        """The tokens that a reply may have; the errors are those of `submit` that the request alone decides."""
        budget = self._reply_budget(len(prompt_token_ids), 0 if prefill_only else params.max_tokens)
        self._check_token_ids(params)
        return budget

    def _reply_budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        window = self.capabilities.max_model_len
        if prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens: give at least one", param="prompt")
        # None takes the rest of the window, which must leave room for one token.
        asked = 1 if max_tokens is None else max_tokens
        if prompt_tokens + asked > window:
            reply = "a reply of at least 1" if max_tokens is None else f"a reply of up to {max_tokens}"
            raise InvalidRequestError(
                f"This server's maximum context length is {window} tokens; the prompt has {prompt_tokens} and {reply} "
                "does not fit beside it: shorten the prompt or ask for a shorter reply",
                param="prompt" if prompt_tokens >= window else "max_tokens",
                code="context_length_exceeded",
                details={"n_prompt_tokens": prompt_tokens, "n_ctx": window},
            )
        return window - prompt_tokens if max_tokens is None else max_tokens

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < self.config.vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token_id}; ids go from 0 to {self.config.vocab_size - 1}", param=name
                    )

    def _enqueue(self, handle: RequestHandle, sequences: list[TokenSequence]) -> None:
        with self._lock:
            if self._error is not None or self._closing:
                raise EngineDeadError(f"the engine serves no more: {self._error or 'it is closed'}")
            if handle.request_id in self._active:
                raise InvalidRequestError(
                    f"request id {handle.request_id!r} belongs to a request that is still active",
                    param="request_id",
                    code="request_id_active",
                )
            waiting = sum(all(not s.blocks for s in group) for group in self._active.values())
            if waiting >= self._max_queue:
                raise QueueFullError(f"{waiting} requests wait already, as many as this server lets wait: try later")
            self._active[handle.request_id] = sequences
            self._inbox.extend(sequences)
            self._requests_total += 1
            self._prompt_tokens_total += len(handle.prompt_token_ids)
            self._lock.notify()

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step, every choice of it; False when no such request is active."""
        with self._lock:
            sequences = self._active.get(request_id)
            if sequences is None:
                return False
            for sequence in sequences:
                sequence.cancelled = True
            self._lock.notify()
            return True

    def statistics(self) -> EngineStatistics:
        """A reading of the engine, from any thread."""
        with self._lock:
            running = len(self._scheduler.running)
            return EngineStatistics(
                alive=self._error is None and not self._closing,
                error=self._error,
                running=running,
                waiting=sum(map(len, self._active.values())) - running,
                requests_total=self._requests_total,
                prompt_tokens_total=self._prompt_tokens_total,
                completion_tokens_total=self._completion_tokens_total,
                preemptions_total=self._scheduler.preemptions,
                kv_blocks_total=self._scheduler.pool.total,
                kv_blocks_free=self._scheduler.pool.free,
            )

    def close(self) -> None:
        """Cancel what runs, end the threads and free the runtime. Closing twice does nothing.

        A step that hangs is not waited for longer than `CLOSING_SECONDS`; its thread is left to the process's end.
        """
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
            self._lock.notify()
            hangs = self._error is not None
        self._over.set()
        self._watch.join()
        self._thread.join(timeout=CLOSING_SECONDS if hangs else None)

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
        """Wait for something to do, take in new sequences, let cancelled ones go; False when closing."""
        with self._lock:
            while not (self._inbox or self._active or self._closing):
                self._lock.wait()
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())
            for sequence in self._scheduler:
                if sequence.cancelled or self._closing:
                    sequence.finish("cancelled")
            self._retire()
            return not self._closing and self._error is None

    def _step(self) -> None:
        """Schedule, run, sample, commit. A step that fails ends the requests that took part in it, and no others."""
        plan = self._scheduler.plan()
        if not plan.work:
            if self._active:
                raise AssertionError("requests are active, and the scheduler finds nothing to do for them")
            return
        for work in plan.work:
            work.sequence.start()
        started = self._step_began = time.monotonic()
        try:
            drawn = self._executor.run(plan)
        except Exception as error:  # a kernel may raise anything; its requests are told
            logger.exception("a step failed")
            self._fail(
                plan, EngineError(f"the step that computed this request failed: {type(error).__name__}: {error}")
            )
        else:
            self._commit(plan, drawn)
        self._step_began = None
        self._scheduler.account(plan, time.monotonic() - started)

    def _commit(self, plan: Plan, drawn: list[Drawn]) -> None:
        sampled = plan.sampled
        for work in plan.work:
            completes = work.completes
            work.sequence.computed += work.tokens
            if completes and work.sequence.budget == 0:
                work.sequence.finish("length")
        errors = [self._accept(sequence, token) for sequence, token in zip(sampled, drawn, strict=True)]
        with self._lock:
            for sequence, error in zip(sampled, errors, strict=True):
                if error is not None:
                    self._fail_request(sequence.handle.request_id, error)
            self._completion_tokens_total += len(sampled)
            self._retire()

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

    def _fail(self, plan: Plan, error: EngineError) -> None:
        with self._lock:
            for request_id in {work.sequence.handle.request_id for work in plan.work}:
                self._fail_request(request_id, error)
            self._retire()

    def _fail_request(self, request_id: str, error: EngineError) -> None:
        for sequence in self._active.get(request_id, ()):
            if not sequence.finished:
                sequence.fail(error)

    def _retire(self) -> None:
        """Forget what is finished; its blocks are free at once."""
        self._scheduler.drop([sequence for sequence in self._scheduler if sequence.finished])
        done = [name for name, group in self._active.items() if all(sequence.finished for sequence in group)]
        for request_id in done:
            del self._active[request_id]

    def _die(self, reason: str) -> None:
        with self._lock:
            self._error = reason
            for request_id in list(self._active):
                self._fail_request(request_id, EngineDeadError(f"the engine died: {reason}"))
            self._active.clear()
