"""The race: every contender gets the same prompts in turns, and what the record says follows from what they did."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pocketllm.bench import compare, limits, speed
from pocketllm.bench.__main__ import main
from pocketllm.bench.contenders import registry
from pocketllm.bench.speed import QUICK, Race
from pocketllm.errors import EngineError
from tests.bench.fakes import FakeRemote, FakeStart, ascending


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> FakeStart:
    fake = FakeStart()
    monkeypatch.setattr(registry, "start", fake)
    monkeypatch.setattr(compare, "start", fake)
    monkeypatch.setattr(compare, "PEERS", {"theirs": registry.Peer("theirs", "nowhere:Nothing", {"gguf": ()})})
    monkeypatch.setattr(registry, "PEERS", compare.PEERS)
    monkeypatch.setattr(limits, "start", lambda threads, **sizes: FakeRemote(ascending, []))
    monkeypatch.setattr(speed, "SETTLE_SECONDS", 0)
    # The prompts' tokens stay within the fake vocabulary.
    monkeypatch.setattr(speed.prompts, "tokens", lambda path, content: [len(word) % 8 for word in content.split()])
    return fake


def race(tiny: Path, *names: str) -> Race:
    made = Race(names, tiny, QUICK, threads=1, device="auto")
    made.start()
    for round_number in range(QUICK.repeat):
        made.run(round_number)
    made.close()
    return made


def test_every_contender_gets_the_same_prompts(starts: FakeStart, tiny: Path) -> None:
    race(tiny, "torch", "numba")
    assert starts.calls["torch"] == starts.calls["numba"]
    prefilled = [tuple(arguments[0]) for method, arguments in starts.calls["torch"] if method == "prefill"]
    assert len(set(prefilled)) == len(prefilled), "a prompt that was read before could come from a cache"
    assert all(remote.closed for remote in starts.made)


def test_rates_and_repeats(starts: FakeStart, tiny: Path) -> None:
    changing = itertools.count()
    starts.replies["numba"] = lambda prompt: [next(changing)] * 99
    figures = race(tiny, "torch", "numba").figures()
    tokens = QUICK.reply_tokens - 1
    assert figures["torch"]["tokens/s"] == {
        "prefill 48": {"median": 96.0, "runs": [96.0, 96.0]},
        "decode 1": {"median": 4.0 * tokens, "runs": [4.0 * tokens] * 2},
        "decode 2": {"median": 8.0 * tokens, "runs": [8.0 * tokens] * 2},
    }
    assert (figures["torch"]["unequal repeats"], figures["numba"]["unequal repeats"]) == (0, 2)
    assert figures["torch"]["peak memory, MiB"] == 12


def test_a_peer_that_cannot_start_is_left_out(starts: FakeStart, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, setup: object) -> FakeRemote:
        if name != "torch":
            raise EngineError(f"{name}: no such architecture")
        return starts(name, setup)

    monkeypatch.setattr(registry, "start", start)
    given = Race(["torch", "theirs"], tiny, QUICK, threads=1, device="auto")
    assert given.start() == {"theirs": "theirs: no such architecture"}
    assert list(given.courses) == ["torch"]
    given.abandon()
    with pytest.raises(EngineError, match="numba: no such"):
        Race(["numba"], tiny, QUICK, threads=1, device="auto").start()


def test_compare(starts: FakeStart, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts.replies["theirs"] = lambda prompt: [*ascending(prompt)[:5], 0, 0, 0]
    stem = tmp_path / "records" / "compared"
    command = ["compare", "--quick", "--backend", "torch", "--model", str(tiny), "--threads", "1", "--out", str(stem)]
    assert main(command) == 0
    page = capsys.readouterr().out
    record = json.loads(stem.with_suffix(".json").read_text())
    assert page == stem.with_suffix(".md").read_text()
    assert record["checkpoint"] == {"name": "tiny", "bytes": tiny.stat().st_size}
    assert record["limits"]["read"] == {"unit": "GB/s", "median": 10.0, "runs": [10.0, 10.0]}
    partings = record["agreement"]["partings"]["theirs"]
    assert len(partings) == 2
    assert all(found["step"] is None or (found["step"] >= 5 and found["margin"] == 1.0) for found in partings)
    assert str(tiny.parent) not in stem.with_suffix(".json").read_text()
    assert main(["show", str(stem.with_suffix(".json"))]) == 0
    assert capsys.readouterr().out == page
