"""Random requests, nearly valid and broken: whatever comes in, what goes out is valid.

``python -m tests.server.fuzz [COUNT]`` runs as many requests of each kind; the test suite runs some.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pocketllm.protocol.openai.chat import ChatRequest
from pocketllm.protocol.openai.completions import CompletionRequest
from pocketllm.server.app import create_app
from pocketllm.server.config import ServerArgs
from pocketllm.server.state import ServerState
from tests.scripted import Vocabulary, scripted_engine

GENERATING = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
PATHS = (
    *GENERATING,
    "/v1/chat/completions/input_tokens",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/apply-template",
)
ENVELOPES = ({"message", "type", "param", "code"}, {"code", "message", "type"})
CONTEXT_DETAILS = {"n_prompt_tokens", "n_ctx"}

TEXTS = st.text(max_size=6) | st.sampled_from(["ABC", "aaa", "a", "<|end|>", "\ud83d", "\u2028", "x" * 2000])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TOKENS = st.lists(st.integers(0, 259), min_size=1, max_size=6)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": TEXTS},
    ),
    min_size=1,
    max_size=3,
)
VALID = {
    "messages": TURNS,
    "prompt": TEXTS | st.lists(TEXTS, min_size=1, max_size=3) | TOKENS | st.lists(TOKENS, min_size=1, max_size=3),
    "content": TEXTS,
    "tokens": TOKENS,
    "max_tokens": st.integers(1, 40),
    "max_completion_tokens": st.integers(1, 40),
    "min_tokens": st.integers(0, 40),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 9),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-1, 2**64 - 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "logit_bias": st.dictionaries(st.integers(0, 255).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(1, 3),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 255), max_size=3),
    "ignore_eos": st.booleans(),
    "cache_prompt": st.booleans(),
    "return_token_ids": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "timeout": st.floats(5, 9),
    "echo": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.dictionaries(TEXTS, JSON, max_size=2),
    "with_pieces": st.booleans(),
}
# Fields that are valid only beside others, and what goes along with them.
GROUPS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "/v1/chat/completions": st.fixed_dictionaries({"logprobs": st.just(True), "top_logprobs": st.integers(0, 20)}),
    "/v1/completions": st.fixed_dictionaries({"logprobs": st.integers(0, 20)})
    | st.fixed_dictionaries({"max_tokens": st.just(0), "echo": st.just(True), "logprobs": st.integers(0, 20)}),
}
MEDDLED = ("model", "tools", "stop", "logprobs", "top_logprobs", "suffix", "max_tokens", "continue_final_message")
REQUIRED = {"/v1/completions": "prompt", "/tokenize": "content", "/v1/tokenize": "content", "/detokenize": "tokens"}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body for it: valid fields, with one of them broken at times."""
    path = draw(st.sampled_from(PATHS))
    table = GENERATING.get(path, ChatRequest if "template" in path or "input" in path else None)
    names = sorted(VALID.keys() & table.model_fields.keys()) if table else ["with_pieces"]
    required = REQUIRED.get(path, "messages")
    most = 0 if required == "tokens" else 6
    chosen = [required, *draw(st.lists(st.sampled_from(names), max_size=most, unique=True))]
    body = {name: draw(VALID[name]) for name in chosen}
    body |= draw(st.just({}) | GROUPS.get(path, st.just({})))
    if draw(st.sampled_from([False, False, False, True])):
        body[draw(st.sampled_from([*chosen, *MEDDLED, "", "x\u2028"]))] = draw(JSON | st.integers(0, 20))
    return path, body


@st.composite
def raw_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and bytes: any, or those of a body with some of them changed."""
    path, body = draw(bodies())
    data = bytearray(json.dumps(body).encode())
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=4)):
        data[place] = byte
    cut = draw(st.just(len(data)) | st.integers(0, len(data)))
    return path, draw(st.just(bytes(data[:cut])) | st.binary(max_size=40))


class Served:
    """The application over a scripted engine, called without sockets; it counts what it answered."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        vocabulary = Vocabulary(["DEF", "\U0001f60a".encode()[:3], "\U0001f60a".encode()[3:]])
        pieces = [vocabulary.id("DEF"), 0xF0, vocabulary.size - 2, vocabulary.size - 1, 97, vocabulary.end]
        script = [*pieces, 98, 0x80]
        self.engine = scripted_engine(lambda context: script[sum(context) % len(script)], vocabulary)
        state = ServerState(ServerArgs(), max_prompts=4)
        state.ready(self.engine)
        app: Flask = create_app(state)
        self.client: FlaskClient = app.test_client()

    def check(self, path: str, data: bytes) -> None:
        """Send a request; fails unless the answer is right for whatever it was, and the next one is served."""
        with self.client.post(path, data=data) as response:
            self.statuses[response.status_code] += 1
            assert response.status_code in (200, 400), (path, data, response.data)
            if response.headers["Content-Type"].startswith("text/event-stream"):
                self._check_stream(response.data)
            else:
                answer = strict(response.data)
                assert response.status_code == 200 or set(answer["error"]) - CONTEXT_DETAILS in ENVELOPES
        with self.client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}) as response:
            assert response.status_code == 200

    def _check_stream(self, data: bytes) -> None:
        events = [event for event in data.decode().split("\n\n") if event and not event.startswith(":")]
        assert events[-1] == "data: [DONE]", data
        for event in events[:-1]:
            assert "error" not in strict(event.removeprefix("data: "))


def strict(data: str | bytes) -> Any:
    """JSON as the standard has it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data, parse_constant=refuse)


def run(served: Served, count: int) -> None:
    """`count` requests of each kind."""
    limits = settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )

    @limits
    @given(bodies())
    def nearly_valid(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        served.check(path, json.dumps(body).encode())

    @limits
    @given(raw_bodies())
    def raw(request: tuple[str, bytes]) -> None:
        served.check(*request)

    kinds: tuple[Callable[[], None], ...] = (nearly_valid, raw)
    for kind in kinds:
        kind()


def main() -> None:
    """Run and tell the figures."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    served = Served()
    started = time.monotonic()
    try:
        run(served, count)
    finally:
        served.engine.close()
    seconds = time.monotonic() - started
    statistics = served.engine.statistics()
    leaked = statistics.kv_blocks_total - statistics.kv_blocks_free
    print(f"{served.statuses.total()} requests in {seconds:.0f} s, by status: {dict(served.statuses)}")
    print(f"{statistics.requests_total} prompts run, {leaked} blocks leaked, running {statistics.running}")


if __name__ == "__main__":
    main()
