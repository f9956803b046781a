"""Log probabilities: the model's own distribution, whatever sampling makes of it, for replies and for prompts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.types import SamplingParams, TokenLogprob
from tests.scripted import Vocabulary, scripted_engine

VOCABULARY = Vocabulary()
TOLERANCE = 1e-5  # float32 logits below 8: a few roundings


def logits_after(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A row of logits that only this context has."""
    seed = hash(context) % 2**32
    return np.random.default_rng(seed).normal(scale=2, size=VOCABULARY.size).astype(np.float32)


def logprobs_after(context: tuple[int, ...]) -> npt.NDArray[np.float64]:
    row = logits_after(context).astype(np.float64)
    return row - np.log(np.exp(row).sum())


def check(entry: TokenLogprob, context: tuple[int, ...], token: int, top: int) -> None:
    expected = logprobs_after(context)
    assert entry.token_id == token
    assert entry.token == VOCABULARY.tokenizer.token_bytes(token)
    assert entry.logprob == pytest.approx(expected[token], abs=TOLERANCE)
    likeliest = np.argsort(-expected, kind="stable")[:top]
    assert [item.token_id for item in entry.top] == likeliest.tolist()
    assert [item.logprob for item in entry.top] == pytest.approx(expected[likeliest].tolist(), abs=TOLERANCE)


@given(
    st.lists(st.lists(st.integers(1, 255), min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(24, 40),
)
@settings(max_examples=20)
def test_prompt_and_reply(prompts: list[list[int]], top: int, chunk: int, blocks: int) -> None:
    engine = scripted_engine(
        logits_after, VOCABULARY, prefill_chunk=chunk, blocks=blocks, max_model_len=90, max_sequences=3
    )
    try:
        params = SamplingParams(temperature=1.0, top_k=3, max_tokens=12, logprobs=top, ignore_eos=True)
        handles = [engine.submit(prompt, params, prompt_logprobs=True) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            result = handle.result()
            tokens = (*prompt, *result.token_ids)
            assert result.logprobs is not None
            assert result.prompt_logprobs is not None
            assert result.prompt_logprobs[0] is None
            entries = [*result.prompt_logprobs[1:], *result.logprobs]
            assert len(entries) == len(tokens) - 1
            for place, entry in enumerate(entries, start=1):
                assert entry is not None
                check(entry, tuple(tokens[:place]), tokens[place], top)
    finally:
        engine.close()


@pytest.fixture
def engine():
    engine = scripted_engine(logits_after, VOCABULARY)
    yield engine
    engine.close()


def test_nothing_is_reported_unasked(engine) -> None:
    result = engine.submit([5], SamplingParams(max_tokens=3)).result()
    assert result.logprobs is None
    assert result.prompt_logprobs is None


def test_bias_and_cuts_do_not_show(engine) -> None:
    plain = engine.submit([5, 6], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)).result()
    changed = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, logit_bias={65: 100}, top_p=0.1)
    biased = engine.submit([5, 6], changed).result()
    assert biased.token_ids == (65,)
    assert biased.logprobs[0].top == plain.logprobs[0].top
    check(biased.logprobs[0], (5, 6), 65, 5)


def test_a_prompt_can_be_scored_without_a_reply(engine) -> None:
    result = engine.submit([5, 6, 7], SamplingParams(logprobs=2), prefill_only=True, prompt_logprobs=True).result()
    assert (result.text, result.finish_reason, result.usage.completion_tokens) == ("", "length", 0)
    assert len(result.prompt_logprobs) == 3
    check(result.prompt_logprobs[2], (5, 6), 7, 2)
    assert engine.statistics().kv_blocks_free == engine.statistics().kv_blocks_total


def test_a_token_of_probability_zero_has_minus_infinity() -> None:
    def certain(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
        row = np.full(VOCABULARY.size, -np.inf, dtype=np.float32)
        row[65] = 3.0
        return row

    engine = scripted_engine(certain, VOCABULARY)
    try:
        result = engine.submit([66, 67], SamplingParams(max_tokens=1, logprobs=5), prompt_logprobs=True).result()
        assert result.logprobs[0].logprob == 0.0
        assert [item.token_id for item in result.logprobs[0].top] == [65]
        assert result.prompt_logprobs[1].logprob == -np.inf
    finally:
        engine.close()


def test_streamed_entries_join_to_the_whole(engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=1, stop=("zzz",), ignore_eos=True)
    whole = engine.submit([9, 9], params).result()
    events = list(engine.submit([9, 9], params).events())
    assert tuple(entry for event in events for entry in event.logprobs) == whole.logprobs
    assert len(whole.logprobs) == len(whole.token_ids)


def test_equal_tokens_have_equal_digests(engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, n=2)
    first, second = (engine.submit([9], params).result() for _ in range(2))
    assert [choice.token_sha for choice in first.outputs] == [choice.token_sha for choice in second.outputs]
    assert len({choice.token_sha for choice in first.outputs}) == 2
    timing = first.outputs[0].timing
    assert min(timing.waiting, timing.prefill, timing.decode) >= 0
