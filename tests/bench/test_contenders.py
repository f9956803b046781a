"""Every contender that can run here, on a tiny model: one distribution, and greedy replies that follow from it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pocketllm.bench.contenders.base import Contender, Setup
from pocketllm.bench.contenders.registry import PEERS, Peer
from tests.forward import all_logits, load_runtime

PROMPTS = [list(b"a tide of "), list(b"the moons ")]
REPLY_TOKENS = 6

# Float32, two layers of width 64; llama.cpp keeps keys and values in float16.
TOLERANCE = 2e-2


def installed_peers() -> list[str]:
    return [name for name, peer in PEERS.items() if peer.lacks(Path(__file__)) is None]


@pytest.fixture(params=["torch", *installed_peers()])
def contender(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Contender]:
    setup = Setup(path=tiny, threads=1, sequences=len(PROMPTS), context=64)
    made_by = "pocketllm.bench.contenders.pocketllm:PocketLLM"
    arguments = {"backend": request.param}
    if request.param in PEERS:
        made_by, arguments = PEERS[request.param].made_by, {}
    module, _, name = made_by.partition(":")
    made: Contender = getattr(importlib.import_module(module), name)(setup, **arguments)
    yield made
    made.close()


def test_distributions_are_those_of_the_reference(contender: Contender, tiny: Path) -> None:
    tokens = list(b"The ferry leaves at seven.")
    logits = all_logits(load_runtime(tiny), tokens).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = contender.log_probabilities(tokens)
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_replies_are_greedy(contender: Contender) -> None:
    decoded = contender.decode(PROMPTS, REPLY_TOKENS)
    for prompt, reply in zip(PROMPTS, decoded.token_ids, strict=True):
        rows = contender.log_probabilities([*prompt, *reply])[len(prompt) - 1 : -1]
        best = rows.max(axis=1)
        assert len(reply) == REPLY_TOKENS
        assert np.all(rows[np.arange(REPLY_TOKENS), reply] >= best - TOLERANCE)
    # An engine that takes prompts one by one may be ahead with the first when the clock starts.
    assert REPLY_TOKENS - 1 <= decoded.steps <= len(PROMPTS) * (REPLY_TOKENS - 1)
    assert decoded.seconds > 0


def test_a_call_leaves_nothing_behind(contender: Contender) -> None:
    once = contender.decode(PROMPTS, REPLY_TOKENS).token_ids
    assert contender.prefill(list(b"something else entirely")) > 0
    assert contender.decode(PROMPTS, REPLY_TOKENS).token_ids == once
    assert contender.decode(PROMPTS[:1], REPLY_TOKENS).token_ids == once[:1]
    assert all(isinstance(fact, str) for fact in contender.facts().values())


def test_an_absent_peer_says_what_it_lacks(tmp_path: Path) -> None:
    peer = Peer("theirs", "nowhere:Nothing", {"gguf": ("json", "a_package_that_nobody_has")})
    assert peer.lacks(Path(__file__)) == "not installed: a_package_that_nobody_has (pip install 'pocketllm[bench]')"
    assert peer.lacks(tmp_path) == "reads no safetensors checkpoint"
