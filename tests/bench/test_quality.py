"""The quality benchmark over contenders whose distributions are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pocketllm.bench import quality
from pocketllm.bench.__main__ import main
from pocketllm.bench.contenders.base import LogProbabilities
from tests.bench.fakes import FakeRemote, FakeStart


class Shifted(FakeRemote):
    """Puts everything on the token after the reference's."""

    def log_probabilities(self, tokens: list[int]) -> LogProbabilities:
        return np.roll(super().log_probabilities(tokens), 1, axis=1)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> FakeStart:
    fake = FakeStart()
    monkeypatch.setattr(
        quality, "start", lambda name, setup: Shifted(len, []) if name == "numba" else fake(name, setup)
    )
    monkeypatch.setattr(quality, "PEERS", {})
    monkeypatch.setattr(quality.prompts, "tokens", lambda path, content: [ord(letter) % 8 for letter in content])
    return fake


def test_figures(starts: FakeStart, tiny: Path, tmp_path: Path) -> None:
    stem = tmp_path / "quality"
    command = ["quality", "--model", str(tiny), "--backend", "torch,numba", "--out", str(stem)]
    assert main(command) == 0
    contenders = json.loads(stem.with_suffix(".json").read_text())["contenders"]
    assert contenders["torch"]["mean KL"] == 0
    assert contenders["torch"]["top-1 agreement"] == 1
    assert contenders["numba"]["mean KL"] > 1
    assert contenders["numba"]["top-1 agreement"] == 0
    windows = [len(arguments[0]) for method, arguments in starts.calls["torch"] if method == "log_probabilities"]
    assert max(windows) == quality.WINDOW
    assert all(remote.closed for remote in starts.made)


def test_a_text_that_cannot_be_read(
    starts: FakeStart, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for text, reason in ((tmp_path / "absent.txt", "give a readable UTF-8 file"), (empty, "it is empty")):
        assert main(["quality", "--model", str(tiny), "--text", str(text)]) == 1
        assert reason in capsys.readouterr().err
