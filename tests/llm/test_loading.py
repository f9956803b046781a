"""What is refused while loading is refused before a weight is read; and where an engine's arguments come from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pocketllm import env
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, ModelNotFoundError, UnsupportedFeatureError
from pocketllm.llm import LLM
from pocketllm.runtimes import registry
from pocketllm.types import SamplingParams
from tests.models.test_against_transformers import save_tiny
from tests.models.wrapping import wrap_checkpoint


def test_a_directory_becomes_an_llm(tiny: Path) -> None:
    with LLM(tiny, backend="torch", kv_cache_mib=4, max_model_len=64) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))[0].usage.completion_tokens == 3
        assert llm.capabilities.details["template_source"] == "fallback"
        assert llm.apply_template([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant: "


def test_reading_a_weight_would_be_noticed(checkpoint: Path) -> None:
    with pytest.raises(AssertionError, match="is read"):
        LLM(checkpoint, backend="torch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "npu"}, r"device 'npu' \(Ascend\) needs its vendor's toolkit, CANN, which is missing here"),
        ({"device": "npu:1", "backend": "torch"}, "device 'npu:1'"),
        ({"device": "cuda:31"}, "cuda:31"),
        ({"device": "cuda:31", "backend": "torch"}, "backend 'torch' cannot run this model: device cuda:31"),
        ({"backend_options": {"turbo": True}}, "no backend has the option 'turbo'; there is: eos_token_id"),
    ],
)
def test_what_is_missing_is_named_before_a_weight_is_read(
    checkpoint: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=message):
        LLM(checkpoint, **arguments)


def test_a_backend_that_is_not_there_is_named_with_those_that_are(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", {"torch": registry.BACKENDS["torch"]})
    with pytest.raises(UnsupportedFeatureError, match=r"there is no backend 'numba' here; there are: torch"):
        LLM(checkpoint, backend="numba")


def test_an_unknown_model() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("no-such-model")


def test_the_environment_is_read_by_from_env_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_MODEL", "other")
    monkeypatch.setenv("POCKETLLM_MAX_QUEUE", "7")
    assert EngineArgs() == EngineArgs(model="smollm2", max_queue=256)
    assert EngineArgs.from_env() == EngineArgs(model="other", max_queue=7)
    assert EngineArgs.from_env(max_queue=8) == EngineArgs(model="other", max_queue=8)
    monkeypatch.setenv("POCKETLLM_MODEL", "")
    assert EngineArgs.from_env().model == "smollm2"


UNUSABLE = {
    "backend": "abacus",
    "device": "tpu",
    "dtype": "int3",
    "max_model_len": "1",
    "max_num_seqs": "0",
    "max_queue": "-1",
    "prefill_chunk": "many",
    "decode_share": "1.5",
    "block_size": "0",
    "kv_cache_mib": "0",
    "prefix_cache": "yes",
    "threads": "0.5",
    "step_timeout": "0",
}


@pytest.mark.parametrize("name", env.ENGINE_SETTINGS)
def test_a_variable_that_cannot_be_used_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = env.ENGINE_SETTINGS[name].name
    if name == "model":  # every text may be a model
        return
    monkeypatch.setenv(variable, UNUSABLE[name])
    with pytest.raises(ConfigurationError, match=f"^environment variable {variable}.*{UNUSABLE[name]}.*: give"):
        EngineArgs.from_env()
    assert EngineArgs.from_env(**{name: getattr(EngineArgs(), name)}) == EngineArgs()


def test_an_argument_is_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_THREADS", "2")
    with pytest.raises(ConfigurationError, match=r"^max_queue is 0"):
        EngineArgs.from_env(max_queue=0)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "npu", "npu:3"])
def test_devices(device: str) -> None:
    assert EngineArgs(device=device).device == device


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "CUDA", None, 0])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"give auto, cpu or cuda\[:i\]"):
        EngineArgs(device=device)


def test_options_stay_the_callers() -> None:
    options = {"eos_token_id": 5}
    args = EngineArgs(backend_options=options)
    options["eos_token_id"] = 6
    assert args.backend_options == {"eos_token_id": 5}
    with pytest.raises(ConfigurationError, match="backend_options is 5"):
        EngineArgs(backend_options=5)  # type: ignore[arg-type]


def test_rows_of_the_model_that_no_token_belongs_to_are_scored(tiny: Path, tmp_path: Path) -> None:
    save_tiny("qwen3_5", {}, tmp_path)
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    config = wrap_checkpoint(tmp_path, vocab_size=7)  # the outer number says nothing
    last = config["vocab_size"] - 1
    with LLM(str(tmp_path), backend="torch", kv_cache_mib=8) as llm:
        (scored,) = llm.score([[1, last, 3]])
        assert [entry.token_id for entry in scored.logprobs[1:]] == [last, 3]
        assert llm.detokenize([last]) == ""
