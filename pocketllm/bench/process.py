"""An object that lives in a process of its own, so that the thread pools of two engines never share one process.

``python -m pocketllm.bench.process FD`` is the child's side: it makes the object that the parent names and calls its
methods until the parent closes the connection.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from pocketllm.errors import EngineError, PocketLLMError

CALL_SECONDS = 900.0
CLOSE_SECONDS = 20.0

logger = logging.getLogger(__name__)


class Remote:
    """The parent's side.

    Args:
        label: names the object in messages.
        made_by: its class, as ``module:name``.
        arguments: what the class is called with, by name.
        environment: environment variables that the child has beside the parent's; None takes one away.
    """

    def __init__(
        self,
        label: str,
        made_by: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        self._label = label
        self._connection, theirs = multiprocessing.Pipe()
        own = {**os.environ, **(environment or {})}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env={name: value for name, value in own.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        try:
            self._ask(made_by, dict(arguments))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method.

        Raises:
            EngineError: the method raised, took longer than `CALL_SECONDS`, or the process ended.
        """
        return self._ask(method, arguments)

    def _ask(self, *message: Any) -> Any:
        try:
            self._connection.send(message)
            if not self._connection.poll(CALL_SECONDS):
                raise EngineError(f"{self._label}: no answer within {CALL_SECONDS:g} seconds")
            succeeded, result = self._connection.recv()
        except (EOFError, OSError):
            raise EngineError(f"{self._label}: its process ended; what it printed says why") from None
        if not succeeded:
            raise EngineError(f"{self._label}: {result}")
        return result

    def close(self) -> None:
        """End the process, kindly first."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(connection: Connection) -> None:
    """The child's side: make the object, answer calls until the parent closes the connection."""
    made: list[Any] = []
    with suppress(EOFError, BrokenPipeError):  # the parent has closed it
        while True:
            what, arguments = connection.recv()
            connection.send(_answer(made, what, arguments))
    for subject in made:
        subject.close()


def _answer(made: list[Any], what: str, arguments: Any) -> tuple[bool, Any]:
    """Whether a call succeeded, and its result or why not; the first makes the object and puts it into `made`."""
    try:
        if made:
            return True, getattr(made[0], what)(*arguments)
        module, _, name = what.partition(":")
        made.append(getattr(importlib.import_module(module), name)(**arguments))
    except PocketLLMError as error:
        return False, str(error)
    except Exception as error:
        logger.exception("%s failed", what)
        return False, f"{type(error).__name__}: {error}"
    return True, None


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
