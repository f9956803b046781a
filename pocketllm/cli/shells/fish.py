"""Completion for fish."""

from __future__ import annotations

from collections.abc import Iterator

from pocketllm.cli.shells.commands import Command, Option, Values

_HEAD = """\
# Completes pocketllm in fish; printed by `pocketllm completion fish`.
function __pocketllm_command
    set -l command pocketllm
    for word in (commandline -opc)[2..]
        switch "$command $word"
            case {commands}
                set command "$command $word"
        end
    end
    echo $command
end
function __pocketllm_at
    test (__pocketllm_command) = "$argv"
end
complete -c pocketllm -f
"""


def script(program: Command) -> str:
    """The script."""
    below = (_quoted(" ".join(command.path)) for command in program.walk() if command is not program)
    lines = (line for command in program.walk() for line in _lines(command))
    return _HEAD.replace("{commands}", " ".join(below)) + "".join(f"complete -c pocketllm {line}\n" for line in lines)


def _lines(command: Command) -> Iterator[str]:
    at = f"-n {_quoted('__pocketllm_at ' + ' '.join(command.path))}"
    for option in command.options:
        yield f"{at} {_option(option)}"
    for below in command.commands:
        yield f"{at} -a {below.name} -d {_quoted(below.help)}"
    if command.argument != Values():
        yield f"{at} {_offer(command.argument)}"


def _option(option: Option) -> str:
    value = "" if option.values is None else f"-r {_offer(option.values)} "
    return f"{' '.join(map(_spelling, option.spellings))} {value}-d {_quoted(option.help)}"


def _spelling(spelling: str) -> str:
    if spelling.startswith("--"):
        return f"-l {spelling[2:]}"
    return f"-{'s' if len(spelling) == 2 else 'o'} {spelling[1:]}"


def _offer(values: Values) -> str:
    words = f" -a {_quoted(' '.join(values.words))}" if values.words else ""
    return ("-F" if values.files else "-f") + words


def _quoted(text: str) -> str:
    """Between single quotes fish knows two escapes only."""
    return "'" + text.replace("\\", r"\\").replace("'", r"\'") + "'"
