"""The offline API: one object that loads a model and answers prompts and conversations."""

from __future__ import annotations

import dataclasses
import difflib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pocketllm.config import EngineArgs
from pocketllm.engine.arguments import IdArray, Prompts
from pocketllm.engine.calls import Call, Calls
from pocketllm.engine.engine import Engine
from pocketllm.engine.loading import load_engine
from pocketllm.errors import EngineDeadError
from pocketllm.progress import LoadingBar, PromptsBar
from pocketllm.types import Capabilities, Message, RequestOutput, SamplingParams, ScoreOutput, TokenEvent


class LLM:
    """A loaded model.

    ``LLM("smollm2", backend="torch")`` and ``LLM(EngineArgs(...))`` are the same thing; what can go wrong while
    loading is told by `pocketllm.engine.loading.load_engine`. Environment variables are read by
    ``LLM(EngineArgs.from_env())`` only. Use it as a context manager, or call `close`.

    Requests from several threads are batched together. Once it is closed, everything but `close` raises
    `EngineDeadError`.

    Where a method takes `progress`, None shows a bar for several prompts on a terminal or in a notebook, and the
    constructor's own `progress` decides for all methods.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineArgs | None = None,
        /,
        *,
        progress: bool | None = None,
        **arguments: Any,
    ) -> None:
        args = engine_args("LLM", model, arguments)
        with LoadingBar(progress) as bar:
            engine = load_engine(args, bar)
        self._calls: Calls | None = Calls(engine)
        self._progress = progress
        # A model that is forgotten without being closed, as when a notebook's cell runs again, gives its memory back.
        weakref.finalize(self, engine.close)

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """An LLM over an engine that runs already."""
        llm = cls.__new__(cls)
        llm._calls = Calls(engine)
        llm._progress = None
        return llm

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do with this model."""
        return self._live.engine.capabilities

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one result for each, in their order.

        Args:
            prompts: a text, token ids (in a list or an integer array), or a list of texts or token ids.
            sampling_params: for all prompts, or one for each.
            request_id: by which `cancel` ends the call; the prompts of a list get ``-0``, ``-1``, ... behind it.
            add_special_tokens: whether a text gets the special tokens that the tokenizer puts around prompts.
            progress: whether to show a bar.

        Raises:
            TypeError: an argument has none of these forms.
            InvalidRequestError: a prompt cannot be run; nothing was started then.
            QueueFullError: other calls fill the queue.
            EngineError: the engine failed at a prompt; the others are cancelled.
        """
        call = self._live.generate(
            prompts, sampling_params, request_id=request_id, add_special_tokens=add_special_tokens
        )
        self._run(call, progress)
        return call.outputs()

    def generate_stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> Iterator[TokenEvent]:
        """Like `generate`, as events while the texts grow.

        It starts when the first event is asked for; leaving the loop early cancels what is left.
        """
        call = self._live.generate(
            prompts, sampling_params, request_id=request_id, add_special_tokens=add_special_tokens
        )
        return self._events(call)

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
            request_id: by which `cancel` ends the call.
            template_variables: further variables of the chat template, such as ``enable_thinking``.

        Raises:
            TypeError: `messages` is no list, or a variable belongs into `sampling_params`.
            InvalidRequestError: a message is malformed, or the conversation does not fit the window.
            TemplateError: the template refuses the conversation.
            UnsupportedFeatureError: a variable would change nothing, because nothing here reads it.
            QueueFullError, EngineError: as in `generate`.
        """
        call = self._live.chat(messages, sampling_params, request_id=request_id, variables=template_variables)
        self._run(call, False)
        return call.outputs()

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **template_variables: Any,
    ) -> Iterator[TokenEvent]:
        """Like `chat`, as events while the reply grows; see `generate_stream`."""
        call = self._live.chat(messages, sampling_params, request_id=request_id, variables=template_variables)
        return self._events(call)

    def score(
        self,
        prompts: Prompts,
        *,
        logprobs: int = 0,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        progress: bool | None = None,
    ) -> list[ScoreOutput]:
        """The log probability of each prompt's tokens, given those before them; nothing is generated.

        Args:
            prompts: as in `generate`.
            logprobs: how many of the likeliest tokens to report beside each, 0 to 20.
            request_id, add_special_tokens, progress: as in `generate`.
        """
        call = self._live.score(
            prompts, logprobs=logprobs, request_id=request_id, add_special_tokens=add_special_tokens
        )
        self._run(call, progress)
        return call.scores()

    def cancel(self, request_id: str) -> bool:
        """End a call, or one prompt of it, at the next step boundary; False when none of that id is active."""
        return self._live.cancel(request_id)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, special tokens parsed."""
        return self._live.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int] | IdArray) -> str:
        """The text of token ids, special tokens included; InvalidRequestError for an id outside the vocabulary."""
        return self._live.decode(token_ids)

    def apply_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_variables: Any
    ) -> str:
        """The exact text that `chat` runs for a conversation, special tokens included.

        A special token's text inside a message stays ordinary text in `chat`; in this string the two look the same.

        Args:
            messages, template_variables: as in `chat`, with the same errors.
            add_generation_prompt: whether it ends with the opening of the assistant's turn, as it does for `chat`.
        """
        return self._live.chat_text(messages, add_generation_prompt=add_generation_prompt, variables=template_variables)

    def close(self) -> None:
        """Cancel what runs and give the memory back. Closing twice does nothing."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return described("LLM", self._calls)

    @property
    def _live(self) -> Calls:
        if self._calls is None:
            raise EngineDeadError("this LLM is closed: make a new one")
        return self._calls

    def _run(self, call: Call, progress: bool | None) -> None:
        with PromptsBar(len(call), self._progress if progress is None else progress) as bar:
            for event in call.events():
                bar.add(event, call.finished)

    def _events(self, call: Call) -> Iterator[TokenEvent]:
        # A generator of this object, which keeps the engine running while it is read.
        yield from call.events()


def engine_args(
    owner: str, model: str | os.PathLike[str] | EngineArgs | None, arguments: Mapping[str, Any]
) -> EngineArgs:
    """What `owner` is constructed with as `EngineArgs`; TypeError for an argument that there is not."""
    if isinstance(model, EngineArgs):
        if arguments:
            raise TypeError(f"{owner} got EngineArgs and {', '.join(arguments)} beside it: give all within EngineArgs")
        return model
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{owner} takes no argument {name!r}: {advice}")
    if model is None:
        return EngineArgs(**arguments)
    if "model" in arguments:
        raise TypeError(f"{owner} got two models, {model!r} and {arguments['model']!r}: give one")
    return EngineArgs(model=os.fspath(model), **arguments)


def described(owner: str, calls: Calls | None) -> str:
    """What `owner` runs, in one line."""
    if calls is None:
        return f"<{owner}, closed>"
    engine, can = calls.engine, calls.engine.capabilities
    return (
        f"<{owner} {engine.model_id} on {can.backend} ({can.device}, {can.dtype}), window {can.max_model_len} tokens>"
    )
