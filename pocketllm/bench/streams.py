"""A client that reads many streamed completions at once and notes when their pieces arrive."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import EngineError


@dataclass(frozen=True, slots=True)
class Stream:
    """A completion that was streamed to its end; times are `time.perf_counter`'s, in seconds.

    Attributes:
        text: the whole reply.
        tokens: as the server's usage counts them.
        began: when the request was sent.
        arrivals: when each piece of text came.
    """

    text: str
    tokens: int
    began: float
    arrivals: tuple[float, ...]

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server for greedy completions.

    Attributes:
        address: ``host:port``.
        model: the name it is asked for by.
        reply_tokens: length of every reply; no token ends one.
        deadline: `time.monotonic` at which everything has to be over.
    """

    address: str
    model: str
    reply_tokens: int
    deadline: float

    def together(self, prompts: Sequence[str]) -> list[Stream]:
        """All completions at once, in the order of the prompts."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.stream, prompts))

    def stream(self, prompt: str) -> Stream:
        """One completion.

        Raises:
            EngineError: the server refused it, broke it off, or was too slow.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.reply_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(self.address, timeout=self._left())
        try:
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(
                    f"the server refuses a completion with status {response.status}: {response.read(500)!r}"
                )
            return self._read(response, began)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"a stream broke off: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, began: float) -> Stream:
        pieces, arrivals, tokens = [], [], 0
        for data in self._events(response):
            if "error" in data:
                raise EngineError(f"a stream ended in an error: {data['error']}")
            text = data["choices"][0]["text"] if data.get("choices") else ""
            if text:
                pieces.append(text)
                arrivals.append(time.perf_counter())
            tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
        if not pieces:
            raise EngineError("a stream brought no text")
        return Stream("".join(pieces), tokens, began, tuple(arrivals))

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Server-sent events up to ``[DONE]``."""
        while line := response.readline():
            self._left()
            if line.startswith(b"data: "):
                payload = line.removeprefix(b"data: ").strip()
                if payload == b"[DONE]":
                    return
                yield json.loads(payload)
        raise EngineError("a stream ended without [DONE]")

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise EngineError("the time for this benchmark is over: give more --seconds, or ask for less")
        return left
