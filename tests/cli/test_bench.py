"""Benchmarks from the terminal: the same as ``python -m pocketllm.bench``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pocketllm.bench.__main__ import BENCHMARKS
from pocketllm.cli.main import main
from tests.cli.running import error_of


def usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: str(benchmark.NAME))
def test_every_benchmark_is_a_command(benchmark: object, capsys: pytest.CaptureFixture[str]) -> None:
    name = getattr(benchmark, "NAME", "")
    assert f"\n    {name}" in usage(["bench"], capsys)
    assert usage(["bench", name], capsys).startswith(f"usage: pocketllm bench {name}")


def test_a_benchmark_gets_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"benchmark": "nothing known"}), encoding="utf-8")
    status = main(["bench", "show", str(path)])
    done = subprocess.CompletedProcess("bench", status, *capsys.readouterr())
    assert "record.json is no record of a benchmark" in error_of(done, 2)


def test_other_commands_do_not_import_the_benchmarks() -> None:
    script = (
        "import sys; from pocketllm.cli.main import main\n"
        "for arguments in (['--help'], ['models', 'list', '--help'], ['inspect', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "sys.exit(any(name.startswith(('pocketllm.bench', 'numpy', 'rich')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd="/", stdout=subprocess.DEVNULL).returncode == 0
