"""The sampler's definition: its random words, its cuts and what it draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation import logits_process

from pocketllm.kernels.contract import NoScalars
from pocketllm.kernels.registry import spec
from pocketllm.kernels.sample import philox_torch
from pocketllm.kernels.sample.philox import gumbel, philox, token_words
from pocketllm.kernels.sample.reference import decide, reference, rows
from pocketllm.kernels.sample.reference import kept as kept_by

Array = npt.NDArray[Any]

# Known answers of Random123 for philox4x32 with ten rounds: counter, key, words.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def settings(count: int = 1, **changes: Any) -> dict[str, Array]:
    """Neutral settings of `count` rows, and some changed ones."""
    neutral = {
        "seed": np.uint64(1),
        "position": np.int32(0),
        "temperature": np.float32(1),
        "top_k": np.int32(0),
        "top_p": np.float32(1),
        "min_p": np.float32(0),
        "frequency_penalty": np.float32(0),
        "presence_penalty": np.float32(0),
        "repetition_penalty": np.float32(1),
    }
    return {
        name: np.broadcast_to(np.asarray(changes.get(name, value), dtype=value.dtype), count)
        for name, value in neutral.items()
    }


def survivors(logits: Array, **changes: Any) -> Array:
    row = rows({"logits": logits[None].astype(np.float32), **settings(**changes)})[0]
    return kept_by(row["x"] / float(row["temperature"]), row)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox(np.array([counter], dtype=np.uint32), (key[0], key[1])).tolist() == [words]
    found = philox_torch.philox(*(torch.tensor(word) for word in (*counter, *key)))
    assert [int(word) for word in found] == words


def test_torch_words_are_the_same() -> None:
    seed, position, vocabulary = 2**63 + 12345, 2**31 - 1, 1001
    words = token_words(seed, position, vocabulary)
    blocks = torch.arange(-(-vocabulary // 4))
    zero = torch.zeros((), dtype=torch.int64)
    key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)
    found = torch.stack(philox_torch.philox(blocks, torch.tensor(position), zero, zero, *key), dim=1)
    np.testing.assert_array_equal(found.flatten()[:vocabulary], words)


def test_gumbel_noise_has_the_moments_of_the_distribution() -> None:
    noise = gumbel(token_words(5, 6, 200_000))
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
    ends = gumbel(np.array([0, 2**32 - 1], dtype=np.uint32))
    np.testing.assert_allclose(ends, [-3.13, 22.87386], atol=1e-5)


def test_draws_follow_the_softmax() -> None:
    logits, count = np.array([1.0, 0.0, 2.0, -1.0, -np.inf], dtype=np.float32), 4000
    ids = reference(
        NoScalars(), logits=np.tile(logits, (count, 1)), **settings(count, position=np.arange(count), temperature=0.8)
    )
    share = np.exp(logits / np.float32(0.8))
    expected = count * share / share.sum()
    counts = np.bincount(ids, minlength=5)
    assert counts[4] == 0
    # Chi-square with three degrees of freedom; 16.3 is passed once in a thousand.
    assert (((counts - expected)[:4] ** 2) / expected[:4]).sum() < 16.3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("changes", "warper"),
    [
        ({"top_k": 7}, logits_process.TopKLogitsWarper(7)),
        ({"top_p": 0.7}, logits_process.TopPLogitsWarper(0.7)),
        ({"min_p": 0.2}, logits_process.MinPLogitsWarper(0.2)),
    ],
)
def test_cuts(seed: int, changes: dict[str, float], warper: logits_process.LogitsProcessor) -> None:
    logits = np.random.default_rng(seed).standard_normal(50).astype(np.float32) * 2
    expected = warper(torch.zeros(1, 1, dtype=torch.int64), torch.tensor(logits)[None].double())[0] > -torch.inf
    np.testing.assert_array_equal(survivors(logits, **changes), expected)


def test_cuts_take_equal_logits_by_id() -> None:
    level = np.zeros(10)
    np.testing.assert_array_equal(np.flatnonzero(survivors(level, top_k=3)), [0, 1, 2])
    # 0.5 is exact: the sixth has exactly half of the mass before it.
    np.testing.assert_array_equal(np.flatnonzero(survivors(level, top_p=0.5)), range(5))
    np.testing.assert_array_equal(np.flatnonzero(survivors(level, top_p=1e-6)), [0])
    np.testing.assert_array_equal(np.flatnonzero(survivors(level, min_p=1.0)), range(10))


def test_cuts_in_their_order() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the first three, 0.4 and 0.3 make up 7/9 of the mass; of all four only 0.7.
    assert survivors(logits, top_k=3, top_p=0.75).sum() == 2
    assert survivors(logits, top_p=0.75).sum() == 3
    # min_p alone keeps two, and the nucleus is not taken anew from these.
    assert survivors(logits, min_p=0.6).sum() == 2
    assert survivors(logits, min_p=0.6, top_p=0.75).sum() == 2
    # The nucleus is of the tempered distribution.
    assert survivors(logits, top_p=0.75, temperature=0.2).sum() == 1


def adjusted(logits: Array, *, bias: float = 0, count: int = 0, seen: bool = False, **changes: Any) -> Array:
    """The logits after one adjustment of id 1."""
    entry = {
        "adjust_start": np.array([0, 1]),
        "adjust_ids": np.array([1]),
        "adjust_bias": np.array([bias], dtype=np.float32),
        "adjust_count": np.array([count]),
        "adjust_seen": np.array([seen]),
    }
    return rows({"logits": logits[None].astype(np.float32), **settings(**changes), **entry})[0]["x"]


def test_bias_and_penalties() -> None:
    logits = np.array([0.5, 1.0, -2.0])
    np.testing.assert_array_equal(adjusted(logits, bias=-100), [0.5, -99, -2])
    np.testing.assert_array_equal(adjusted(logits, count=3, frequency_penalty=0.5), [0.5, -0.5, -2])
    np.testing.assert_array_equal(adjusted(logits, count=3, presence_penalty=0.5), [0.5, 0.5, -2])
    np.testing.assert_array_equal(adjusted(logits, presence_penalty=0.5, seen=True), logits)
    np.testing.assert_array_equal(adjusted(logits, repetition_penalty=2.0), logits)
    # The bias comes first: it makes the logit negative, so that it is multiplied.
    np.testing.assert_array_equal(adjusted(logits, bias=-3, seen=True, repetition_penalty=2.0), [0.5, -4, -2])
    everything = {"frequency_penalty": 0.25, "presence_penalty": 1.0, "repetition_penalty": 2.0}
    np.testing.assert_array_equal(adjusted(logits, bias=1, count=2, seen=True, **everything), [0.5, -0.5, -2])


@pytest.mark.parametrize("seed", range(5))
def test_repetition_penalty(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal(3)
    processor = logits_process.RepetitionPenaltyLogitsProcessor(1.5)
    expected = processor(torch.tensor([[1]]), torch.tensor(logits.astype(np.float32))[None].double())[0]
    np.testing.assert_array_equal(adjusted(logits, seen=True, repetition_penalty=1.5), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_drawn_give_minus_one(temperature: float) -> None:
    logits = np.zeros((5, 40), dtype=np.float32)
    logits[1, 3], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf
    allowed = np.full((5, 2), 0xFFFFFFFF, dtype=np.uint32)
    allowed[4] = 0, 0xFFFFFF00  # only bits beyond the vocabulary
    ids = reference(NoScalars(), logits=logits, allowed=allowed, **settings(5, temperature=temperature))
    assert ids[0] >= 0
    np.testing.assert_array_equal(ids[1:], -1)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = np.array([[1.0, 5.0, 5.0, 2.0]], dtype=np.float32)
    assert reference(NoScalars(), logits=logits, **settings(temperature=0.0)).tolist() == [1]


def test_a_row_does_not_depend_on_the_others() -> None:
    case = spec("sample").make_case(np.random.default_rng(2), {"R": 6, "V": 300})
    arrays = {name: array for name, array in case.arrays.items() if not name.startswith("adjust")}
    alone = [
        reference(NoScalars(), **{name: array[row : row + 1] for name, array in arrays.items()})[0] for row in range(6)
    ]
    np.testing.assert_array_equal(reference(NoScalars(), **arrays), alone)


def test_near_ties_are_rare() -> None:
    """Else the property tests of samplers would prove little."""
    contract = spec("sample")
    drawn = [
        decide(row)
        for seed in range(40)
        for row in rows(contract.make_case(np.random.default_rng(seed), {"R": 6, "V": 300}).arrays)
    ]
    assert {len(decision.choices) for decision in drawn} == {1}
    assert all(decision.token in decision.choices for decision in drawn)


def test_a_near_tie_allows_both_sides() -> None:
    row = rows({"logits": np.zeros((1, 2), dtype=np.float32), **settings(seed=3)})[0]
    noise = gumbel(token_words(3, 0, 2))
    row["x"] = np.array([0.0, noise[0] - noise[1]])
    assert decide(row).choices == {0, 1}
