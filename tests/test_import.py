"""Starting is cheap: what is heavy is imported when it is first used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "numba", "triton", "cupy", "numpy", "transformers", "flask", "tokenizers"}


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport json, sys; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import pocketllm; pocketllm.__version__; dir(pocketllm)",
        "from pocketllm import EngineArgs, SamplingParams, PocketLLMError",
        "from pocketllm.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from pocketllm.cli.main import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass",
        "from pocketllm.cli.main import main\nassert main(['generate', 'x', '--backend', 'abacus']) == 2",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert modules_after(code) & HEAVY == set()


def test_the_top_level_links_are_no_modules() -> None:
    for name in ("kernels", "runtimes", "bench"):
        assert name not in sys.modules
    assert not any((entry or ".") == "." for entry in sys.path)


def test_every_public_name_arrives() -> None:
    import pocketllm

    assert set(dir(pocketllm)) == {name for name in pocketllm.__all__ if hasattr(pocketllm, name)}
    with pytest.raises(AttributeError, match="no attribute 'Frobnicator'"):
        _ = pocketllm.Frobnicator
