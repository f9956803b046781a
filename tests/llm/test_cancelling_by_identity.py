"""Cancelling a call by its id ends its own requests, not another's that has taken a free id."""

from __future__ import annotations

import pytest

from pocketllm import EngineError
from pocketllm.engine.calls import Calls
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary, scripted_engine


@pytest.fixture
def calls():
    engine = scripted_engine(lambda context: 65 if len(context) < 900 else 256, Vocabulary())
    yield Calls(engine)
    engine.close()


def test_a_finished_prompts_id_may_belong_to_another_call(calls: Calls) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=1), SamplingParams(temperature=0.0, max_tokens=800)]
    first = calls.generate(["a", "b"], params, request_id="x", add_special_tokens=True)
    events = first.events()
    while not any(handle.done for handle in first.handles):
        next(events)
    other = calls.engine.submit([1], SamplingParams(temperature=0.0, max_tokens=50), request_id="x-0")
    assert calls.cancel("x")
    assert other.result().finish_reason == "length"
    assert [output.finish_reason for output in (list(events), first.outputs())[1]] == ["length", "cancelled"]


def test_half_a_score_is_an_error(calls: Calls) -> None:
    call = calls.score([[1] * 500], logprobs=0, request_id="s", add_special_tokens=True)
    events = call.events()
    call.cancel()
    list(events)
    with pytest.raises(EngineError, match="cancelled"):
        call.scores()
