"""The records in the documentation: every page is what its record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pocketllm.bench import show
from pocketllm.bench.__main__ import main

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
RECORDS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_page_is_made_from_its_record(record: Path) -> None:
    assert record.with_suffix(".md").read_text(encoding="utf-8") == show.markdown(record)
    assert json.loads(record.read_text(encoding="utf-8"))["circumstances"].keys() >= {"machine", "commit", "command"}


def test_every_page_has_its_record() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages == {record.stem for record in RECORDS}
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [page for page in pages if f"{page}.md" not in readme] == []


def test_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    for text in ("", "[]", "{}", '{"benchmark": "nothing"}'):
        file.write_text(text)
        assert main(["show", str(file)]) == 1
        assert "is no record of a benchmark" in capsys.readouterr().err
