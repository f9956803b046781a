"""The programs of GCC and binutils that emulated kernels are made and looked at with."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from pocketllm.errors import ConfigurationError


def output_of(command: Sequence[str], failure: str, folder: Path | None = None) -> str:
    """What a program prints.

    Args:
        command: the program and its arguments.
        failure: what is not done where it fails, such as ``kernel add does not compile``.
        folder: where it runs.

    Raises:
        ConfigurationError: it is not there, or it fails; the message has what it says.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ConfigurationError(
            f"{failure}: {command[0]} cannot be run ({error}): install GCC with binutils"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip() or f"{command[0]} ended with status {done.returncode} and said nothing"
        raise ConfigurationError(f"{failure}:\n{said}")
    return done.stdout
