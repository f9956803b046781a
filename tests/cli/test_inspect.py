"""What a model is, told without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.checkpoint.safetensors import SafetensorsCheckpoint
from pocketllm.cli.main import main
from pocketllm.config import BACKENDS
from pocketllm.models.family import model_types
from tests.cli.running import error_of, run_cli
from tests.forward import load_runtime
from tests.models.test_against_transformers import save_tiny
from tests.models.wrapping import wrap_checkpoint
from tests.scripted import Vocabulary

TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\x1b{% endfor %}"


def save_checkpoint(family: str, directory: Path, template: str | None = TEMPLATE) -> None:
    """A tiny checkpoint with tokenizer and template."""
    save_tiny(family, {}, directory)
    Vocabulary().tokenizer._backend.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def inspected(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()  # what saving it has said
    assert main(["inspect", str(directory), "--json", *flags]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    facts: dict[str, Any] = json.loads(said.out)
    return facts


@pytest.mark.parametrize("family", model_types())
def test_the_facts_are_those_of_the_loaded_model(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(family, tmp_path)
    facts = inspected(tmp_path, capsys)
    assert (facts["model"], facts["model_type"], facts["container"]) == (tmp_path.name, family, "safetensors")
    runtime = load_runtime(tmp_path)
    assert facts["cache"]["bytes_per_token"] * 16 == runtime.bytes_per_block
    assert facts["vocab_size"] == runtime.vocab_size
    runtime.close()
    with open_checkpoint(tmp_path) as checkpoint:
        assert facts["weight_bytes"] == sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        assert facts["formats"]["F32"]["tensors"] == len(checkpoint.tensors)
    assert facts["parameters"] * 4 == facts["weight_bytes"]
    assert facts["tokenizer"]["kind"] == "BPE"
    assert facts["tokenizer"]["special_tokens"] == {"<|end|>": 256, "<|pad|>": 257}
    assert facts["chat_template"] == {"origin": "checkpoint", "names_tools": True, "names_thinking": False}


def test_no_weight_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(checkpoint: SafetensorsCheckpoint, name: str) -> None:
        pytest.fail(f"{name} was read")

    save_checkpoint("llama", tmp_path)
    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", refuse)
    inspected(tmp_path, capsys)


def test_every_backend_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("llama", tmp_path)
    backends = inspected(tmp_path, capsys)["backends"]
    assert tuple(backends["refusals"]) == BACKENDS
    assert backends["refusals"]["torch"] is None
    assert backends["refusals"][backends["auto"]] is None
    assert backends["reason"]


def test_nobody_can_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.runtimes.registry.BACKENDS", {})
    save_checkpoint("llama", tmp_path)
    backends = inspected(tmp_path, capsys)["backends"]
    assert backends["auto"] is None
    assert backends["reason"].startswith("no backend can run this model")
    assert None not in backends["refusals"].values()


def test_tensors_and_template_are_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("llama", tmp_path)
    facts = inspected(tmp_path, capsys, "--tensors", "--prompt-template")
    assert facts["chat_template"]["source"] == TEMPLATE
    names = [tensor["name"] for tensor in facts["tensors"]]
    assert "model.embed_tokens.weight" in names
    assert main(["inspect", str(tmp_path), "--tensors", "--prompt-template"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert r"[{{ m.role }}]{{ m.content }}\x1b{% endfor %}" in " ".join(shown.split("\n"))


def test_a_model_without_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("llama", tmp_path, template=None)
    assert inspected(tmp_path, capsys)["chat_template"]["origin"] == "fallback"
    assert main(["inspect", str(tmp_path)]) == 0
    assert "none in the checkpoint" in capsys.readouterr().out


def test_people_see_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in ("family qwen3", "layers", "KV cache", "<|end|> 256", "names tools", "F32", "torch     yes"):
        assert text in shown


def test_a_damaged_model_is_one_line(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in error_of(run_cli("inspect", str(tmp_path)), 1)
    (tmp_path / "page.gguf").write_text("<html>", encoding="utf-8")
    assert "page.gguf" in error_of(run_cli("inspect", str(tmp_path / "page.gguf"), "--json"), 1)
    assert "'nobody'" in error_of(run_cli("inspect", "nobody"), 1)


@pytest.mark.parametrize("size", [None, "x", 7, 2**40])
def test_an_outer_vocabulary_says_nothing(size: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_5", tmp_path)
    config = wrap_checkpoint(tmp_path, vocab_size=size)
    assert inspected(tmp_path, capsys)["vocab_size"] == config["vocab_size"]


def test_a_model_that_does_not_say_its_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": None}))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 1
    assert "by the configuration it is [32000, 48]" in capsys.readouterr().err  # what Llama's configuration defaults to
