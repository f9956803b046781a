"""Events of several requests as one stream."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from functools import partial

from pocketllm.engine.request import RequestHandle
from pocketllm.types import TokenEvent


def merged_events(handles: Sequence[RequestHandle]) -> Iterator[TokenEvent]:
    """Events of all requests in the order in which they come.

    Leaving early cancels what is left; so does an error of one request, which is raised here.
    """
    ready: queue.SimpleQueue[RequestHandle] = queue.SimpleQueue()
    for handle in handles:
        handle.notify(partial(ready.put, handle))
    open_handles = len(handles)
    try:
        while open_handles:
            handle = ready.get()
            event = handle.next_event()
            if event is not None:
                yield event
            if handle.done:
                open_handles -= 1
    finally:
        for handle in handles:
            if not handle.done:
                handle.cancel()
