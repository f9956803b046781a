"""What an unmodified client makes of the server's errors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.scripted import scripted_engine
from tests.served import PATIENCE, Gate, Serve, eventually, opened

PATH = "/v1/completions"


def ask(address: str, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        reply = client.completions.create(model="any", **{"prompt": "x", "max_tokens": 1, **fields})
        return list(reply) if fields.get("stream") else reply


def refused(kind: type[openai.APIStatusError], address: str, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(kind) as caught:
        ask(address, **fields)
    return caught.value


def test_the_requests_own_faults(alphabet: str) -> None:
    assert refused(openai.BadRequestError, alphabet, temperature=3).param == "temperature"
    assert refused(openai.BadRequestError, alphabet, prompt="x" * 2000).code == "context_length_exceeded"
    with openai.OpenAI(base_url=f"http://{alphabet}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="any", input="x")


def test_a_full_queue_and_an_id_that_runs(serve: Serve, gate: Gate) -> None:
    engine = scripted_engine(gate, max_sequences=1, max_queue=1)
    address = serve(engine)
    with ExitStack() as stack:
        stack.enter_context(opened(address, PATH, {"prompt": "x", "request_id": "mine"}))
        assert gate.reached.wait(PATIENCE)
        refused(openai.ConflictError, address, extra_body={"request_id": "mine"})
        stack.enter_context(opened(address, PATH, {"prompt": "x"}))
        eventually(lambda: engine.statistics().waiting == 1)
        error = refused(openai.RateLimitError, address)
        assert (error.code, error.type) == ("queue_full", "rate_limit_error")


def test_the_servers_faults(serve: Serve, slow: Any) -> None:
    def broken(context: tuple[int, ...]) -> int:
        raise RuntimeError("a kernel failed")

    failing = serve(scripted_engine(broken))
    assert refused(openai.InternalServerError, failing).status_code == 500
    with pytest.raises(openai.APIError, match="a kernel failed"):
        ask(failing, stream=True)
    assert refused(openai.InternalServerError, serve(None)).status_code == 503
    late = refused(
        openai.InternalServerError, serve(scripted_engine(slow)), max_tokens=900, extra_body={"timeout": 0.05}
    )
    assert (late.status_code, late.type) == (504, "timeout_error")


def test_without_a_budget_the_window_is_the_limit(serve: Serve) -> None:
    address = serve(scripted_engine(lambda context: ord("a"), max_model_len=40))
    for limit in (None, openai.omit):
        choice = ask(address, prompt="x" * 8, max_tokens=limit).choices[0]
        assert (len(choice.text), choice.finish_reason) == (32, "length")
