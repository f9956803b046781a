"""``python -m pocketllm``, and the command ``pocketllm``."""

from __future__ import annotations

import signal
import sys


def run() -> int:
    """The command line's exit status; quiet about ctrl-C from here on, while the command's modules load included."""
    try:
        from pocketllm.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # as shells count it


if __name__ == "__main__":
    sys.exit(run())
