"""What the documentation and the notebooks show, run as it stands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHADED = {"first_steps": 2}
"""How many results with their tokens shaded a notebook shows: a reply and a score."""
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_offline_api(real_model: Path) -> None:
    """Each program in one namespace, its output compared with the text after it."""
    blocks = BLOCK.findall((ROOT / "docs" / "offline.md").read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    names: dict[str, Any] = {"__name__": "offline"}
    for (_, program), (_, expected) in zip(blocks[::2], blocks[1::2], strict=True):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(program, "docs/offline.md", "exec"), names)
        assert out.getvalue() == expected


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path: Path, real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert sum('title="' in page for page in pages) == SHADED.get(path.stem, 0)
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)


SCRIPT = """
from pocketllm import LLM, SamplingParams

llm = LLM("smollm2", max_model_len=256)
for result in llm.generate(["1, 2, 3, 4, 5,"] * 2, SamplingParams(temperature=0.0, max_tokens=6)):
    print(result.text)
"""


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd="/", env=dict(os.environ))
    return done.returncode, done.stdout, done.stderr


def test_a_program_that_never_closes_ends_cleanly_and_draws_no_bars(real_model: Path, tmp_path: Path) -> None:
    expected = (0, " 6, 7,\n 6, 7,\n", "")
    assert run("-c", SCRIPT) == expected
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run(str(script)) == expected


def test_a_program_whose_stream_is_left_ends_cleanly(real_model: Path) -> None:
    program = (
        "from pocketllm import LLM\nstream = LLM('smollm2', max_model_len=256).generate_stream('1, 2,')\nnext(stream)"
    )
    assert run("-c", program) == (0, "", "")


def test_an_error_in_a_program_is_one_line_at_its_end(real_model: Path) -> None:
    code, out, errors = run("-c", "from pocketllm import LLM\nLLM('smollm2', bakend='torch')")
    assert (code, out) == (1, "")
    assert errors.splitlines()[-1] == "TypeError: LLM takes no argument 'bakend': did you mean 'backend'?"
