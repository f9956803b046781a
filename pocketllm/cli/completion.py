"""``pocketllm completion``: the script that teaches a shell to complete command lines."""

from __future__ import annotations

import argparse

NAME = "completion"
HELP = "Print the script with which a shell completes command lines."
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
bash:  eval "$(pocketllm completion bash)"       in ~/.bashrc
zsh:   source <(pocketllm completion zsh)        in ~/.zshrc, after compinit
fish:  pocketllm completion fish | source        in ~/.config/fish/config.fish"""
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def run(given: argparse.Namespace) -> int:
    """Print the script."""
    from pocketllm.cli.shells import bash, fish, zsh
    from pocketllm.cli.shells.commands import read_commands

    scripts = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
    print(scripts[given.shell](read_commands(given.program)), end="")
    return 0
