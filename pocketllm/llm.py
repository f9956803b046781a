"""The offline API: one object that loads a model and answers prompts and conversations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from pocketllm.config import EngineArgs
from pocketllm.engine.engine import Engine
from pocketllm.engine.loading import load_engine, quiet
from pocketllm.engine.request import RequestHandle
from pocketllm.engine.stream import merged_events
from pocketllm.runtimes.base import Progress
from pocketllm.types import Capabilities, Message, Prompt, RequestOutput, SamplingParams, TokenEvent


class LLM:
    """A loaded model.

    ``LLM("smollm2", backend="torch")`` and ``LLM(EngineArgs(...))`` are the same thing; what can go wrong while
    loading is told by `pocketllm.engine.loading.load_engine`. Use it as a context manager, or call `close`.

    Requests from several threads are batched together.
    """

    def __init__(self, model: str | EngineArgs | None = None, /, **arguments: Any) -> None:
        if isinstance(model, EngineArgs):
            if arguments:
                raise TypeError(f"give {', '.join(arguments)} within EngineArgs")
            args = model
        else:
            args = EngineArgs(**arguments) if model is None else EngineArgs(model=model, **arguments)
        with _ProgressBar() as progress:
            self._engine = load_engine(args, progress)

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """An LLM over an engine that runs already."""
        llm = cls.__new__(cls)
        llm._engine = engine
        return llm

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do with this model."""
        return self._engine.capabilities

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; one result for each, in their order.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of lists of token ids.
            sampling_params: for all prompts, or one for each.
            request_id: by which `cancel` finds the request; the prompts of a list get ``-0``, ``-1``, ... behind it.
            add_special_tokens: whether a text gets the special tokens that the tokenizer puts around prompts.
        """
        token_ids = [self._engine.encode_prompt(p, add_special_tokens=add_special_tokens) for p in _each(prompts)]
        return [handle.result() for handle in self._submit(token_ids, sampling_params, request_id)]

    def generate_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> Iterator[TokenEvent]:
        """Like `generate`, as events while the texts grow. Leaving the loop early cancels what is left."""
        token_ids = [self._engine.encode_prompt(p, add_special_tokens=add_special_tokens) for p in _each(prompts)]
        return merged_events(self._submit(token_ids, sampling_params, request_id))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation; a list with one result.

        Args:
            messages: OpenAI's shape, such as ``{"role": "user", "content": "Hi"}``. They are not changed.
            sampling_params: how the reply is drawn.
            request_id: by which `cancel` finds the request.
            template_variables: further variables of the chat template, such as ``enable_thinking``.
        """
        token_ids = self._engine.render_chat(messages, template_variables=template_variables)
        return [handle.result() for handle in self._submit([token_ids], sampling_params, request_id)]

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> Iterator[TokenEvent]:
        """Like `chat`, as events while the reply grows."""
        token_ids = self._engine.render_chat(messages, template_variables=template_variables)
        return merged_events(self._submit([token_ids], sampling_params, request_id))

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step boundary; False when no such request is active."""
        return self._engine.cancel(request_id)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, special tokens parsed."""
        return self._engine.encode_prompt(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._engine.tokenizer.decode(list(token_ids))

    def close(self) -> None:
        """Cancel what runs and give the memory back."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(
        self,
        token_ids: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        request_id: str | None,
    ) -> list[RequestHandle]:
        params = _params_for(len(token_ids), sampling_params)
        names = _names(len(token_ids), request_id)
        handles: list[RequestHandle] = []
        try:
            for index, (ids, own, name) in enumerate(zip(token_ids, params, names, strict=True)):
                handles.append(self._engine.submit(ids, own, request_id=name, prompt_index=index))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _params_for(count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling params for {count} prompts: give one for all, or one for each")
    return list(given)


def _names(count: int, request_id: str | None) -> list[str | None]:
    if request_id is None:
        return [None] * count
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]


class _ProgressBar:
    """A bar for loading, where somebody can see it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self._show if sys.stderr.isatty() or "ipykernel" in sys.modules else quiet

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, leave=False)
        self._bar.set_description(what)
        self._bar.update(done - self._bar.n)
