"""Seeds that nobody gave: drawn, or derived from the prompt."""

from __future__ import annotations

import numpy as np
import pytest

from pocketllm.engine.sequence import SEED_BITS
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams
from tests.scripted import Vocabulary

DRAWN = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(make_llm) -> LLM:
    vocabulary = Vocabulary()
    flat = np.zeros(vocabulary.size, dtype=np.float32)
    return make_llm(lambda context: flat, vocabulary)


def test_without_a_salt_every_request_has_its_own(llm: LLM) -> None:
    results = llm.generate([[1]] * 8, DRAWN)
    assert len({result.seed for result in results}) == 8
    again = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=results[3].seed)
    assert llm.generate([[1]], again)[0].text == results[3].text


def test_with_a_salt_the_prompt_decides(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def seeds(salt: str) -> list[int]:
        monkeypatch.setenv("POCKETLLM_SEED_SALT", salt)
        results = llm.generate([[1], [1], [2], [1, 2]], DRAWN)
        assert results[0].outputs == results[1].outputs
        return [result.seed for result in results]

    pepper, salt = seeds("pepper"), seeds("salt")
    assert pepper[0] == pepper[1]
    assert len({*pepper, *salt}) == 6
    assert seeds("pepper") == pepper
    assert max(*pepper, *salt) < 2**SEED_BITS


def test_a_seed_that_is_given_stays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_SEED_SALT", "salt")
    assert llm.generate("a", SamplingParams(seed=5, max_tokens=1))[0].seed == 5
