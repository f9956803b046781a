"""Serve a model until a signal ends it."""

from __future__ import annotations

import errno
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from pocketllm.config import EngineArgs
from pocketllm.errors import PocketLLMError, shortened
from pocketllm.server.config import ServerArgs
from pocketllm.server.http_server import HTTPServer
from pocketllm.server.state import ServerState

if TYPE_CHECKING:
    from pocketllm.engine.engine import Engine

log = logging.getLogger(__name__)

SPARE_THREADS = 16
"""HTTP threads beyond those that requests can hold, so that /health and cancellation never wait for a stream."""

LOADER_SECONDS = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Report = Callable[[str, int, int], None]
Loader = Callable[[EngineArgs, Report], "Engine"]


class _StoppedError(Exception):
    """Loading is pointless: the server is stopping."""


def serve(engine_args: EngineArgs, server_args: ServerArgs, load: Loader) -> int:
    """Listen, load the model beside it, and serve until SIGINT or SIGTERM; for the main thread.

    Args:
        engine_args: what `load` is called with.
        server_args: the server's own settings.
        load: makes the engine; it reports phase, done and total.

    Returns:
        The process's exit status: 0 after a signal, 1 when the port or the model cannot be had (stderr says why).

    Raises:
        ConfigurationError: the host is no address.
    """
    capacity = engine_args.max_num_seqs + engine_args.max_queue
    state = ServerState(server_args, max_prompts=capacity)
    try:
        server = HTTPServer(state, threads=capacity + SPARE_THREADS)
    except OSError as error:
        advice = ": choose another port with --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        _say(f"cannot listen on {server_args.host}:{server_args.port}: {error.strerror or error}{advice}")
        return 1
    loader = _Loading(engine_args, state, server, load)
    previous = {number: signal.signal(number, lambda *_: _stop_once(server)) for number in SIGNALS}
    try:
        _say(f"listening at {server.url}, loading {shortened(engine_args.model)}")
        loader.start()
        server.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        loader.finish()
    return 1 if loader.failed else 0


def _stop_once(server: HTTPServer) -> None:
    """End the server; the next signal ends the process at once."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _say("stopping")
    server.stop()


class _Loading:
    """The model's way into the server's state, on a thread of its own."""

    def __init__(self, args: EngineArgs, state: ServerState, server: HTTPServer, load: Loader) -> None:
        self.failed = False
        self._args = args
        self._state = state
        self._server = server
        self._load = load
        self._stopped = threading.Event()
        self._phase = ""
        self._engine: Engine | None = None
        # A daemon, because a loader deep in foreign code cannot be told to stop.
        self._thread = threading.Thread(target=self._run, name="load-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Stop loading, or close what was loaded."""
        self._stopped.set()
        self._thread.join(LOADER_SECONDS)
        if self._engine is not None:
            self._engine.close()

    def _run(self) -> None:
        try:
            self._engine = self._load(self._args, self._report)
        except _StoppedError:
            return
        except PocketLLMError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("loading %s failed", self._args.model)
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._state.ready(self._engine)
            capabilities = self._engine.capabilities
            _say(
                f"ready: {self._state.model_id(self._engine)} at {self._server.url} "
                f"(backend {capabilities.backend}, window {capabilities.max_model_len} tokens)"
            )

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        self._state.report(phase, done, total)
        if phase != self._phase:
            self._phase = phase
            _say(f"loading: {phase}")

    def _fail(self, reason: str) -> None:
        self.failed = True
        self._state.fail(reason)
        _say(f"cannot load {shortened(self._args.model)}: {reason}")
        self._server.stop()


def _say(text: str) -> None:
    print(f"pocketllm: {text}", file=sys.stderr, flush=True)
