"""What ends a reply and how it is drawn by default: who of the checkpoint's files and the caller decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.sampler import SamplingDefaults
from pocketllm.engine.termination import end_token_ids
from pocketllm.errors import CheckpointError, ConfigurationError
from tests.scripted import ScriptedConfig, Vocabulary

TOKENIZER = Vocabulary().tokenizer
DECLARED = 256
VOCAB = 258


def ends(
    options: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    configured: tuple[int, ...] = (),
    *,
    naming: str = "hf",
    tokenizer: Any = TOKENIZER,
) -> tuple[set[int], str]:
    checkpoint: Any = SimpleNamespace(naming=naming, generation_config=generation or {})
    config = ScriptedConfig(vocab_size=VOCAB, eos_token_ids=configured)
    ids, source = end_token_ids(options or {}, checkpoint, config, tokenizer)
    return set(ids), source


def test_the_first_source_that_names_an_id_decides() -> None:
    assert ends({"eos_token_id": 1}, {"eos_token_id": 2}, (3,)) == ({1}, "backend_options")
    assert ends({}, {"eos_token_id": 2}, (3,)) == ({2}, "generation_config")
    assert ends({}, {"eos_token_id": None}, (3,)) == ({3}, "config")
    assert ends({}, {}, (3, 4)) == ({3, 4}, "config")
    assert ends() == ({DECLARED}, "tokenizer")
    assert ends(tokenizer=SimpleNamespace(eos_token_ids=())) == (set(), "none")


@pytest.mark.parametrize("given", [[5, 6], (5, 6), [6, 5, 5]])
def test_several_ids(given: Any) -> None:
    assert ends({"eos_token_id": given}) == ({5, 6}, "backend_options")
    assert ends({}, {"eos_token_id": given}) == ({5, 6}, "generation_config")


def gguf_tokenizer(eos: int | None) -> Tokenizer:
    """Tokens 0 and 1 are text, 2 to 5 control tokens."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|own_end|>"],
        "tokenizer.ggml.token_type": [1, 1, 3, 3, 3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }
    return Tokenizer.from_gguf(metadata if eos is None else metadata | {"tokenizer.ggml.eos_token_id": eos})


def test_gguf_ends_at_its_metadatas_id_and_every_end_of_turn_among_the_control_tokens() -> None:
    assert ends(naming="gguf", tokenizer=gguf_tokenizer(5)) == ({3, 4, 5}, "config")
    assert ends(naming="gguf", tokenizer=gguf_tokenizer(3)) == ({3, 4}, "config")
    assert ends({"eos_token_id": 0}, naming="gguf", tokenizer=gguf_tokenizer(5)) == ({0}, "backend_options")


@pytest.mark.parametrize("value", [True, "2", 1.5, -1, [1, "2"], [True], {"a": 1}, [[1]]])
def test_what_is_no_token_id_is_its_givers_fault(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^backend option eos_token_id is .*: give a token id or a list"):
        ends({"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id is .*: give a token id"):
        ends({}, {"eos_token_id": value})


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="eos_token_id is None"):
        ends({"eos_token_id": None}, {"eos_token_id": 2})


def test_ids_beyond_the_vocabulary_are_their_givers_fault() -> None:
    assert ends({"eos_token_id": VOCAB - 1}) == ({VOCAB - 1}, "backend_options")
    with pytest.raises(ConfigurationError, match=rf"id {VOCAB} \(from backend_options\).*vocabulary of {VOCAB}"):
        ends({"eos_token_id": [1, VOCAB]})
    with pytest.raises(CheckpointError, match=rf"id {VOCAB} \(from generation_config\)"):
        ends({}, {"eos_token_id": VOCAB})
    with pytest.raises(CheckpointError, match=rf"id {VOCAB} \(from config\)"):
        ends({}, {}, (VOCAB,))
    with pytest.raises(CheckpointError, match=rf"id {VOCAB} \(from tokenizer\)"):
        ends(tokenizer=SimpleNamespace(eos_token_ids=(VOCAB,)))


def test_a_checkpoint_names_its_sampling_defaults() -> None:
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}
    raw = {**sampling, "do_sample": True, "eos_token_id": 2}
    assert SamplingDefaults.from_generation_config(raw) == SamplingDefaults(**sampling)


def test_a_checkpoint_can_ask_not_to_be_sampled_from() -> None:
    assert SamplingDefaults.from_generation_config({"do_sample": False, "temperature": 0.6}).temperature == 0.0


@pytest.mark.parametrize("raw", [{}, {"temperature": None, "top_k": None}, {"do_sample": True}])
def test_what_it_leaves_open_is_off(raw: dict[str, Any]) -> None:
    assert SamplingDefaults.from_generation_config(raw) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


def test_one_default_leaves_the_others_off() -> None:
    assert SamplingDefaults.from_generation_config({"temperature": 0}) == SamplingDefaults(temperature=0.0)
    assert SamplingDefaults.from_generation_config({"top_k": 5}) == SamplingDefaults(top_k=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.5), ("top_k", 2.5), ("min_p", True)],
)
def test_defaults_that_cannot_be_used_are_the_checkpoints_fault(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {name} is "):
        SamplingDefaults.from_generation_config({name: value})
