"""What goes wrong is one line and an exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pocketllm
from pocketllm.cli import generate
from pocketllm.cli.main import main

from .running import error_of, run_cli

COMMANDS = ("serve", "generate", "chat", "inspect", "models", "bench", "completion")


def test_version() -> None:
    assert run_cli("--version").stdout == f"pocketllm {pocketllm.__version__}\n"


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("models", "pull")])
def test_help_goes_to_standard_output(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr()
    assert said.out.startswith(" ".join(("usage: pocketllm", *command)))
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("severe",), "'severe'"),
        (("generate",), "prompt"),
        (("models",), "ACTION"),
        (("models", "pull"), "name"),
        (("serve", "--port", "x"), "argument --port: 'x': give a whole number"),
        (("serve", "--parallel", "2", "--bogus"), "unrecognized arguments: --bogus (see pocketllm serve --help)"),
        (("generate", "hi", "--temprature=0"), "did you mean --temperature? (see pocketllm generate --help)"),
        (("bench", "show", "--bogus"), "FILE.json"),
        (("completion", "tcsh"), "'tcsh'"),
        (("serve", "--host", ""), "host is empty"),
        (("serve", "--max-queue", "5000"), "max_queue is 5000: give a whole number from 1 to 4096"),
        (("serve", "--host", "a b", "--model", "."), "host is 'a b', which is no address"),
        (("serve", "--max-que", "2"), "--max-que"),
        (("chat", "--backend", "abacus"), "backend is 'abacus': give one of auto"),
        (("chat", "--config", "/nowhere/pocketllm.toml"), "/nowhere/pocketllm.toml: No such file"),
        (("generate", "hi", "--temperature", "-1"), "temperature is -1.0: give a number from 0 to 2"),
        (("generate", "hi", "--json", "--stream"), "leave --stream out"),
    ],
)
def test_a_wrong_call(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    done = subprocess.CompletedProcess(arguments, status, *capsys.readouterr())
    assert message in error_of(done, 2)


@pytest.mark.parametrize("arguments", [("generate", "hi"), ("chat",), ("serve", "--port", "0")])
def test_without_the_default_model_the_command_to_run_is_named(arguments: tuple[str, ...]) -> None:
    assert "`pocketllm models pull smollm2`" in error_of(run_cli(*arguments), 1)


def test_a_model_that_is_nowhere() -> None:
    assert "'nobody'" in error_of(run_cli("generate", "hi", "--model", "nobody"), 1)


def test_a_damaged_model(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    assert "cut.gguf" in error_of(run_cli("generate", "hi", "--model", str(path)), 1)


@pytest.mark.parametrize("place", range(4))
def test_verbose_shows_the_traceback(place: int) -> None:
    arguments = ["models", "path", "nobody"]
    arguments.insert(place, "--verbose")
    done = run_cli(*arguments)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ModelNotFoundError" in done.stderr


def test_ctrl_c_has_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(given: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(generate, "run", interrupted)
    assert main(["generate", "hi"]) == 130


def test_ctrl_c_while_the_program_starts_is_quiet() -> None:
    script = (
        "import runpy, sys\n"
        "class Interrupting:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'pocketllm.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "runpy.run_module('pocketllm', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (130, "")


def test_only_the_program_s_own_news_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import logging; from pocketllm.cli.main import _set_up_logging\n"
        "_set_up_logging(verbose=False, level=logging.INFO)\n"
        "for name in ('torch.somewhere', 'pocketllm.somewhere'): logging.getLogger(name).info('news')\n"
        "logging.getLogger('torch.somewhere').warning('a fault')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert [line.split(" ", 1)[1] for line in done.stderr.splitlines()] == [
        "INFO pocketllm.somewhere: news",
        "WARNING torch.somewhere: a fault",
    ]


def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path / "file", "Not a directory"), ("~nobody-here/cache", "home folder is not known")):
        monkeypatch.setenv("POCKETLLM_CACHE_DIR", str(place))
        text = error_of_pull(run_cli("models", "pull", "smollm2"))
        assert "POCKETLLM_CACHE_DIR" in text
        assert reason in text


def error_of_pull(done: subprocess.CompletedProcess[str]) -> str:
    """As `error_of`, after the line that says what is pulled."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("pocketllm: pulling")]
    return error_of(subprocess.CompletedProcess(done.args, done.returncode, done.stdout, "\n".join(lines)), 2)


def test_what_nobody_foresaw_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(given: object) -> int:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(generate, "run", broken)
    status = main(["generate", "hi"])
    done = subprocess.CompletedProcess("generate", status, *capsys.readouterr())
    assert error_of(done, 1) == "RuntimeError: two lines (with --verbose the traceback is shown)"
    with pytest.raises(RuntimeError):
        main(["--verbose", "generate", "hi"])


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    script = (
        "import sys; from pocketllm.cli import main, models\n"
        "models.run = lambda given: [print('x' * 80) for _ in range(100000)] and 0\n"
        "sys.exit(main.main(['models', 'list']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.readline()
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 1
