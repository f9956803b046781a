"""Real layers behind the cache: after a hit a model says what it says when it computes everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.batching import OutputRows, flat_batch
from pocketllm.engine.cache import CacheManager
from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.engine.scheduler import Plan, Work
from pocketllm.runtimes.base import Runtime
from tests.engine.sequences import new_sequence
from tests.forward import Logits, as_numpy, load_runtime
from tests.models.test_against_transformers import save_tiny

BLOCKS, STATES = 64, 8
TOLERANCE = 1e-4
"""Two float32 runs of a tiny model whose products were split differently; logits are of order 1."""


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, {}, made)
    return made


@pytest.fixture(scope="module", params=["torch", "numba"])
def runtime(folder: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    loaded = load_runtime(folder, backend=request.param, blocks=BLOCKS)
    yield loaded
    loaded.close()


def logits_of(runtime: Runtime, cache: CacheManager, tokens: list[int], chunk: int, reply: int) -> tuple[int, Logits]:
    """What was cached of all but the last `reply` tokens, and the logits after these and after each of the reply."""
    sequence = new_sequence(tokens[: len(tokens) - reply])
    assert cache.admit(sequence, len(tokens))
    found, rows = sequence.computed, []
    while sequence.computed < len(tokens):
        count = min(chunk, sequence.remaining)
        cache.plan(sequence, count)
        plan = Plan((Work(sequence, count),), prefills=True, decodes=False)
        last = as_numpy(runtime.forward(flat_batch(plan, OutputRows((count - 1,), (), ()), cache.block_size)).logits)
        cache.commit(sequence, count)
        if sequence.remaining == 0:
            rows.append(last[0])
            sequence.tokens += tokens[len(sequence.tokens) :][:1]
    cache.release(sequence)
    return found, np.stack(rows)


def test_logits_after_a_hit(runtime: Runtime) -> None:
    states = STATES if runtime.bytes_per_state else 0
    prompt = np.random.default_rng(5).integers(0, 320, size=70).tolist()
    turn = [*prompt, *range(30), 7, 7]
    cases = [(prompt, 2), (prompt, 2), ([*prompt[:60], 3, 4], 1), (turn, 30), (turn, 1)]

    def run(keys: PrefixKeys | None) -> tuple[list[int], list[Logits]]:
        runtime.allocate(BLOCKS, STATES)
        cache = CacheManager(BLOCKS, 16, states=states, keys=keys)
        results = [logits_of(runtime, cache, tokens, 24, reply) for tokens, reply in cases]
        return [found for found, _ in results], [rows for _, rows in results]

    (nothing, cold), (found, warm) = run(None), run(PrefixKeys(runtime.numerics_id))
    assert nothing == [0] * 5
    assert found == [0, 64, 48, 64, 96]
    for one, other in zip(cold, warm, strict=True):
        tolerance = 0.0 if runtime.batch_invariant is None else TOLERANCE
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
