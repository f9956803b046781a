"""What shells offer while a command line is typed."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pocketllm.checkpoint.store import KNOWN_MODELS
from pocketllm.cli.completion import SHELLS
from pocketllm.cli.main import main, program_parser
from pocketllm.cli.shells.commands import Command, Option, Values, read_commands
from pocketllm.config import BACKENDS

# A command line up to the cursor, what is offered there, and what is not.
CASES = [
    ("pocketllm ", {"serve", "chat", "inspect", "bench"}, {"pull", "smollm2"}),
    ("pocketllm se", {"serve"}, {"chat"}),
    ("pocketllm --v", {"--verbose", "--version"}, {"serve"}),
    ("pocketllm serve --po", {"--port"}, {"--host"}),
    ("pocketllm serve --backend ", {"auto", *BACKENDS}, {"--port"}),
    ("pocketllm serve --port 80 --backend n", {"numba"}, {"torch"}),
    ("pocketllm serve --port ", set(), {"serve", "auto", "model.gguf"}),
    ("pocketllm serve --config c", {"config.toml"}, {"model.gguf", "chat"}),
    ("pocketllm chat --model ", {*KNOWN_MODELS, "model.gguf", "a folder"}, {"auto"}),
    ("pocketllm chat --dtype b", {"bfloat16"}, {"bash"}),
    ("pocketllm models ", {"pull", "list", "rm", "path"}, {"serve"}),
    ("pocketllm models rm ", set(KNOWN_MODELS), {"model.gguf"}),
    ("pocketllm --verbose models path s", {"smollm2"}, {"serve"}),
    ("pocketllm inspect m", {"model.gguf"}, {"models"}),
    ("pocketllm bench ", {"generate", "show"}, {"serve"}),
    ("pocketllm bench show c", {"config.toml"}, {"compare"}),
    ("pocketllm completion ", set(SHELLS), {"serve"}),
]


@pytest.fixture(scope="module")
def program() -> Command:
    return read_commands(program_parser())


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    paths = {}
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        paths[shell] = tmp_path / f"script.{shell}"
        paths[shell].write_text(capsys.readouterr().out, encoding="utf-8")
    return paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files to be offered."""
    made = tmp_path / "folder"
    (made / "a folder").mkdir(parents=True)
    for name in ("model.gguf", "config.toml"):
        (made / name).touch()
    return made


def bash_offers(script: Path, folder: Path, line: str) -> set[str]:
    words = line.split(" ")
    # Bash cuts words at "=" too.
    words = [part for word in words for part in re.split(r"(?<==)|(?==)", word) if part or not word]
    return set(_run(["bash", "-c", _BASH, "bash", str(script), *words], folder).splitlines())


_BASH = """\
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMPREPLY=()
$(complete -p pocketllm | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
[[ ${#COMPREPLY[@]} == 0 ]] || printf '%s\\n' "${COMPREPLY[@]}"
"""


def fish_offers(script: Path, folder: Path, line: str) -> set[str]:
    shown = _run(["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"], folder)
    words = (offer.partition("\t")[0] for offer in shown.splitlines())
    # Fish writes files as they would be typed, and after --option= the option too.
    return {word.replace("\\ ", " ").rstrip("/").rpartition("=")[2] for word in words}


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout


ASKED: dict[str, Callable[[Path, Path, str], set[str]]] = {"bash": bash_offers, "fish": fish_offers}


@pytest.mark.parametrize("shell", [shell for shell in ASKED if shutil.which(shell)])
@pytest.mark.parametrize(("line", "offered", "kept_back"), CASES)
def test_a_shell_offers_what_fits(
    scripts: dict[str, Path], folder: Path, shell: str, line: str, offered: set[str], kept_back: set[str]
) -> None:
    offers = ASKED[shell](scripts[shell], folder, line)
    assert offers >= offered
    assert not offers & kept_back
    if not offered:
        assert offers == set()


@pytest.mark.parametrize("shell", [shell for shell in ASKED if shutil.which(shell)])
def test_a_value_behind_an_equals_sign(scripts: dict[str, Path], folder: Path, shell: str) -> None:
    assert ASKED[shell](scripts[shell], folder, "pocketllm serve --backend=t") >= {"torch", "triton"}


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_a_shell_can_read_its_script(scripts: dict[str, Path], shell: str) -> None:
    subprocess.run([shell, "-n", str(scripts[shell])], check=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_has_every_command_and_option(scripts: dict[str, Path], shell: str, program: Command) -> None:
    text = scripts[shell].read_text(encoding="utf-8")
    for command in program.walk():
        assert re.search(rf"\b{command.name}\b", text)
        for spelling in itertools.chain.from_iterable(option.spellings for option in command.options):
            assert re.search(rf"(?<![\w-])(--?|-l |-s |-o ){spelling.lstrip('-')}(?![\w-])", text), spelling


def test_commands_are_read_from_the_parser(program: Command) -> None:
    paths = {" ".join(command.path): command for command in program.walk()}
    assert {"pocketllm", "pocketllm serve", "pocketllm models pull", "pocketllm bench show"} <= set(paths)
    assert all(command.help for command in paths.values())
    options = {spelling: option for option in paths["pocketllm generate"].options for spelling in option.spellings}
    assert options["-np"] == options["--parallel"]
    assert options["--json"].values is None
    assert options["--config"] == Option(
        ("--config",), "TOML file with values for flags, such as max-queue = 64", False, Values(files=True)
    )
    assert options["--temperature"].help == "0 (always the likeliest token) to 2"
    assert options["--stop"].repeated
    assert paths["pocketllm completion"].argument == Values(SHELLS)


def test_words_need_no_quotes(program: Command) -> None:
    words = [
        word
        for command in program.walk()
        for values in (command.argument, *(option.values for option in command.options))
        if values is not None
        for word in values.words
    ]
    assert words
    assert all(re.fullmatch(r"[\w.-]+", word) for word in words)
