"""The page of seeded faults: every test that it names exists, and where it lists a test's faults none is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "seeded_faults.md"
FILE = re.compile(r"`(tests/[\w/]+\.py)`")
TEST = re.compile(r"`(test_\w+(?:\[[^`]+\])?)`")


def named() -> Iterator[str]:
    """The tests in the last columns; each section names their file before its table."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        found = FILE.search(section)
        assert found is not None, f"the section names no file of tests: {section.splitlines()[0]}"
        for row in re.findall(r"^\| .* \| (.*) \|$", section, re.MULTILINE):
            yield from (f"{found[1]}::{test}" for test in TEST.findall(row))


def collected(files: set[str]) -> set[str]:
    """Every test of these files, in a process of its own: imports of this one are not theirs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *sorted(files)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


def stands_for(name: str, test: str) -> bool:
    """Whether a name on the page means this test: the same, or without its last parameters."""
    return test == name or test.startswith((f"{name}[", f"{name.removesuffix(']')}-"))


def test_the_page_names_tests_that_exist_and_all_faults_of_those_that_it_lists() -> None:
    names = list(named())
    assert len(names) == len(set(names)) > 0
    tests = collected({name.partition("::")[0] for name in names})
    for name in names:
        assert any(stands_for(name, test) for test in tests), f"there is no test {name}"
    listed = {name.partition("[")[0] for name in names}
    missing = {
        test for test in tests if test.partition("[")[0] in listed and not any(stands_for(name, test) for name in names)
    }
    assert not missing, f"{PAGE.name} lacks {', '.join(sorted(missing))}"
