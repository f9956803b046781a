"""The requests that run now, by every id that names them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.errors import REQUEST_ID_ACTIVE, ModelUnavailableError


class Cancellable(Protocol):
    """Work that can be ended early."""

    def cancel(self) -> bool:
        """End it; False when nothing of it runs any more."""


class ActiveRequests:
    """A thread-safe register of running requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[str, Cancellable] = {}
        self._stopped = False

    def add(self, ids: Sequence[str], work: Cancellable) -> None:
        """Register `work` under all of `ids`.

        Raises:
            InvalidRequestError: an id names another request that runs (HTTP 409).
            ModelUnavailableError: the server is stopping.
        """
        with self._lock:
            if self._stopped:
                raise ModelUnavailableError("The server is shutting down.")
            for request_id in ids:
                if request_id in self._by_id:
                    raise InvalidRequestError(
                        f"A request with the id {request_id!r} is running: choose another id, or wait for its end.",
                        param="request_id",
                        code=REQUEST_ID_ACTIVE,
                    )
            self._by_id.update(dict.fromkeys(ids, work))

    def remove(self, ids: Sequence[str]) -> None:
        """Forget finished work."""
        with self._lock:
            for request_id in ids:
                self._by_id.pop(request_id, None)

    def cancel(self, request_id: str) -> bool:
        """End the request of that id; False when there is none, or it has finished."""
        with self._lock:
            work = self._by_id.get(request_id)
        return work is not None and work.cancel()

    def stop(self) -> None:
        """End every request and register no further one."""
        with self._lock:
            self._stopped = True
            works = set(self._by_id.values())
        for work in works:
            work.cancel()
