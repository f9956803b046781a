"""Completion for zsh: one function a command, over zsh's own ``_arguments``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pocketllm.cli.shells.commands import Command, Option, Values

_HEAD = """\
#compdef pocketllm
# Completes pocketllm in zsh; printed by `pocketllm completion zsh`.
"""

# Found on the function path, the file is the function; read by `source`, it has to say what it completes.
_TAIL = """\
if [[ $funcstack[1] == _pocketllm ]]; then
    _pocketllm "$@"
else
    compdef _pocketllm pocketllm
fi
"""


def script(program: Command) -> str:
    """The script."""
    return "".join((_HEAD, *map(_function, program.walk()), _TAIL))


def _function(command: Command) -> str:
    specs = [spec for option in command.options for spec in _option(option)]
    if not command.commands:
        specs.append(f"*: :{_action(command.argument)}")
        return _body(command, ["_arguments " + _joined(specs)])
    names = " ".join(shlex.quote(f"{below.name}:{below.help}") for below in command.commands)
    calls = (f"    {below.name}) {_function_name(below)} ;;" for below in command.commands)
    return _body(
        command,
        [
            "local curcontext=$curcontext state line",
            "typeset -A opt_args",
            "_arguments -C " + _joined([*specs, "1: :->command", "*:: :->rest"]),
            "case $state in",
            f"command) local -a commands=({names}); _describe command commands ;;",
            "rest) case $line[1] in",
            *calls,
            "esac ;;",
            "esac",
        ],
    )


def _body(command: Command, lines: list[str]) -> str:
    return f"{_function_name(command)}() {{\n" + "".join(f"    {line}\n" for line in lines) + "}\n"


def _function_name(command: Command) -> str:
    return "_" + "_".join(command.path)


def _joined(specs: list[str]) -> str:
    return " ".join(map(shlex.quote, specs))


def _option(option: Option) -> Iterator[str]:
    """One specification for each spelling; one of them rules the others out."""
    for spelling in option.spellings:
        once = "*" if option.repeated else f"({' '.join(option.spellings)})"
        long = spelling.startswith("--") and option.values is not None
        value = "" if option.values is None else f": :{_action(option.values)}"
        yield f"{once}{spelling}{'=' if long else ''}[{_escaped(option.help)}]{value}"


def _action(values: Values) -> str:
    """What completes a value, as a command that `_arguments` evaluates; a blank where nothing can."""
    calls = [f"compadd {' '.join(values.words)}"] if values.words else []
    calls += ["_files"] if values.files else []
    return f"{{{'; '.join(calls)}}}" if calls else " "


def _escaped(text: str) -> str:
    return text.replace("[", r"\[").replace("]", r"\]")
