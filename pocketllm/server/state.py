"""Where the server stands with its model: loading, ready or failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pocketllm.protocol.errors import ModelUnavailableError
from pocketllm.server.access_log import AccessLog
from pocketllm.server.active import ActiveRequests
from pocketllm.server.config import ServerArgs

if TYPE_CHECKING:
    from pocketllm.engine.engine import Engine

LOADING = "Loading model"
LOADING_RETRY_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase of loading is; `total` is 0 while unknown."""

    phase: str
    done: int
    total: int


class ServerState:
    """What all routes share.

    Attributes:
        args: the server's settings.
        max_prompts: most prompts of one request: as many as could run and wait at once.
        access_log: where requests are written down.
        active: the running requests.
        progress: the latest news of loading, or None.
    """

    def __init__(self, args: ServerArgs, *, max_prompts: int) -> None:
        self.args = args
        self.max_prompts = max_prompts
        self.access_log = AccessLog(args.access_log)
        self.active = ActiveRequests()
        self.progress: Progress | None = None
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._failure: str | None = None

    def report(self, phase: str, done: int, total: int) -> None:
        """News of loading."""
        self.progress = Progress(phase, done, total)

    def ready(self, engine: Engine) -> None:
        """The model is loaded."""
        with self._lock:
            self._engine = engine

    def fail(self, reason: str) -> None:
        """The model cannot be loaded."""
        with self._lock:
            self._failure = reason

    @property
    def loading(self) -> bool:
        """Whether the model may still become ready."""
        with self._lock:
            return self._engine is None and self._failure is None

    @property
    def engine(self) -> Engine:
        """The engine; ModelUnavailableError until the model is loaded."""
        with self._lock:
            if self._engine is not None:
                return self._engine
            if self._failure is not None:
                raise ModelUnavailableError(f"The model could not be loaded: {self._failure}")
        raise ModelUnavailableError(LOADING, retry_after=LOADING_RETRY_SECONDS)

    @property
    def live_engine(self) -> Engine:
        """The engine; ModelUnavailableError also when it has died."""
        engine = self.engine
        statistics = engine.statistics()
        if not statistics.alive:
            raise ModelUnavailableError(f"The engine has died: {statistics.error or 'no reason is known'}")
        return engine

    def model_id(self, engine: Engine) -> str:
        """The name that replies carry."""
        return self.args.aliases[0] if self.args.aliases else engine.model_id
