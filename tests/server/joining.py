"""Replies of both endpoints and both modes in one shape, so that they can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.served import call

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


@dataclass
class Choice:
    """A choice, put together from however many pieces it came in."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        assert self.finish_reason is None, "nothing follows a choice's end"
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        self.finish_reason = choice["finish_reason"]
        self.token_ids += choice.get("token_ids", [])
        for name, values in (choice["logprobs"] or {}).items():
            if name in LISTS and values:
                self.logprobs.setdefault(name, []).extend(values)


@dataclass
class Reply:
    """A reply with its choices in the order of their index."""

    choices: list[Choice]
    usage: dict[str, Any]
    seed: int | None
    prompt_token_ids: list[list[int]]
    timings: dict[str, Any]
    proof: dict[str, Any]

    @property
    def comparable(self) -> Any:
        """What depends neither on the mode nor on what the cache has by now."""
        counts = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return self.choices, counts, self.seed, self.prompt_token_ids, self.proof["token_sha"]


def ask(address: str, path: str, stream: bool, **fields: Any) -> Reply:
    """The reply to a request; a streamed one with its usage."""
    if not stream:
        answer = call(address, "POST", path, fields)
        assert answer.status == 200, answer.data
        return _reply([answer.json])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = call(address, "POST", path, fields | options).events
    assert done == "[DONE]"
    return _reply(chunks)


def _reply(bodies: list[dict[str, Any]]) -> Reply:
    choices: dict[int, Choice] = {}
    prompts: dict[int, list[int]] = {}
    for body in bodies:
        if "prompt_token_ids" in body:
            prompts[0] = body["prompt_token_ids"]
        for choice in body["choices"]:
            choices.setdefault(choice["index"], Choice()).add(choice)
            if "prompt_token_ids" in choice:
                prompts[choice["index"]] = choice["prompt_token_ids"]
    last = bodies[-1]
    return Reply(
        [choices[index] for index in sorted(choices)],
        last["usage"],
        last["seed"],
        [prompts[index] for index in sorted(prompts)],
        last["timings"],
        last["pocketllm"],
    )
