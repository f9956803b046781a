"""Completion for bash, from version 3.2 on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from pocketllm.cli.shells.commands import Command, Values

_HEAD = """\
# Completes pocketllm in bash; printed by `pocketllm completion bash`.
_pocketllm() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local command=pocketllm words="" files="" index
    # Bash cuts --port=80 into three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "$command ${COMP_WORDS[index]}" in
"""

_TAIL = """\
    esac
    COMPREPLY=()
    while IFS="" read -r index; do
        COMPREPLY+=("$index")
    done < <(
        compgen -W "$words" -- "$current"
        [[ -z $files ]] || compgen -f -- "$current"
    )
    [[ -z $files ]] || compopt -o filenames 2>/dev/null
}
complete -F _pocketllm pocketllm
"""


def script(program: Command) -> str:
    """The script."""
    below = [command for command in program.walk() if command is not program]
    return "".join(
        (
            _HEAD,
            _case((" ".join(command.path) for command in below), 'command+=" ${COMP_WORDS[index]}"', indent=8),
            "        esac\n    done\n",
            '    case "$command:$previous" in\n',
            *_value_cases(program),
            '    *) case "$command:$current" in\n',
            *_word_cases(program),
            "    esac ;;\n",
            _TAIL,
        )
    )


def _value_cases(program: Command) -> Iterator[str]:
    """One case for each set of values, of all options that take one of them."""
    places: dict[Values, list[str]] = {}
    for command in program.walk():
        for option in command.options:
            if option.values is not None:
                spelled = (_place(command, spelling) for spelling in option.spellings)
                places.setdefault(option.values, []).extend(spelled)
    for values, options in places.items():
        yield _case(options, _offer(values.words, files=values.files))


def _word_cases(program: Command) -> Iterator[str]:
    """What may stand where no option asks for a value: options behind a dash, else commands or arguments."""
    for command in program.walk():
        spellings = [spelling for option in command.options for spelling in option.spellings]
        yield f"    {shlex.quote(_place(command, '-'))}*) {_offer(spellings, files=False)} ;;\n"
        words = [*(below.name for below in command.commands), *command.argument.words]
        yield f"    {shlex.quote(_place(command, ''))}*) {_offer(words, files=command.argument.files)} ;;\n"


def _place(command: Command, word: str) -> str:
    return " ".join(command.path) + ":" + word


def _offer(words: Iterable[str], *, files: bool) -> str:
    return f"words={shlex.quote(' '.join(words))}" + (" files=1" if files else "")


def _case(patterns: Iterable[str], action: str, indent: int = 4) -> str:
    return f"{' ' * indent}{'|'.join(map(shlex.quote, patterns))}) {action} ;;\n"
