"""waitress, as this server needs it: envelopes on its own errors, a way to stop, refusals that arrive."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask
from waitress.utilities import RequestEntityTooLarge

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.errors import openai_error
from pocketllm.protocol.json_text import dumps
from pocketllm.server.access_log import Record
from pocketllm.server.app import MEGABYTE, create_app

if TYPE_CHECKING:
    from pocketllm.server.state import ServerState

LINGER_SECONDS = 5.0
STOP_SECONDS = 5.0
FLUSH_SECONDS = 1.0
IDLE_CONNECTIONS = 512
"""Connections beyond those that are being served: clients keep them open between requests."""


class _EnvelopeErrorTask(ErrorTask):  # type: ignore[misc]
    """Answers what the HTTP parser refuses, in the envelope that the application uses."""

    def execute(self) -> None:
        refusal = self.request.error
        message = f"{refusal.reason}: {refusal.body.rstrip('.')}."
        if isinstance(refusal, RequestEntityTooLarge):
            most = self.channel.adj.max_request_body_size - 1
            message = f"The request's body is larger than the {most} bytes that this server takes."
        body = dumps(openai_error(refusal.code, message).body).encode()
        self.status = f"{refusal.code} {refusal.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)
        # What the parser refuses never comes to the application, which writes down everything else.
        self.channel.server.state.access_log.write(Record().line(None, None, refusal.code))


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that, after refusing a body, throws the rest of it away for a while before it closes.

    Closing with bytes unread resets the connection, and a client that is still sending would never see the refusal.
    """

    error_task_class = _EnvelopeErrorTask
    body_refused = False
    linger_until: float | None = None

    def received(self, data: bytes) -> bool:
        if self.body_refused:
            if self.linger_until is not None and time.monotonic() > self.linger_until:
                super().handle_close()
            return False
        taken: bool = super().received(data)
        self.body_refused = any(isinstance(request.error, RequestEntityTooLarge) for request in tuple(self.requests))
        return taken

    def handle_close(self) -> None:
        if self.body_refused and self.linger_until is None and self._end_sending():
            self.linger_until = time.monotonic() + LINGER_SECONDS
            self.will_close = False
        else:
            super().handle_close()

    def _end_sending(self) -> bool:
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the client is gone: there is nobody to linger for
            return False
        return True


class HTTPServer(TcpWSGIServer):  # type: ignore[misc]
    """Listens from its construction on.

    Attributes:
        url: where it listens.
        state: what its routes share.

    Raises:
        ConfigurationError: the host is no address.
        OSError: it cannot listen there.
    """

    channel_class = _Channel

    def __init__(self, state: ServerState, *, threads: int) -> None:
        args = state.args
        _check_host(args.host)
        adjustments = Adjustments(
            listen=f"{_bracketed(args.host)}:{args.port}",
            threads=threads,
            connection_limit=threads + IDLE_CONNECTIONS,
            # waitress refuses bodies of exactly this size too.
            max_request_body_size=int(args.max_body_mb * MEGABYTE) + 1,
            recv_bytes=65536,
            # Without it a client that leaves before its response is not noticed.
            channel_request_lookahead=1,
            asyncore_use_poll=True,
            ident=None,
        )
        super().__init__(create_app(state), adj=adjustments)
        self.state = state
        self._stopping = False
        # Reentrant, because a signal handler may interrupt its holder. Waking a closed loop would write to a file that
        # may be another's by then.
        self._closing = threading.RLock()
        self.url = f"http://{_bracketed(self.effective_host)}:{self.effective_port}"

    def run(self) -> None:
        """Serve until `stop`, then end what runs and close."""
        while not self._stopping:
            self._turn(1.0)
        self.accepting = False
        self.state.active.stop()
        self.task_dispatcher.shutdown(timeout=STOP_SECONDS)
        self._flush(time.monotonic() + FLUSH_SECONDS)
        with self._closing:
            wasyncore.close_all(self._map)

    def stop(self) -> None:
        """Make `run` return soon; from any thread, or from a signal handler."""
        with self._closing:
            if not self._stopping:
                self._stopping = True
                self.pull_trigger()

    def _turn(self, timeout: float) -> None:
        wasyncore.loop(timeout=timeout, use_poll=True, map=self._map, count=1)

    def _flush(self, deadline: float) -> None:
        """Send what the ended requests have left in their buffers."""
        while time.monotonic() < deadline and any(
            channel.total_outbufs_len for channel in self.active_channels.values()
        ):
            self._turn(0.1)


def _check_host(host: str) -> None:
    """Refuse what waitress would refuse without a name, or take for several addresses: it splits at white space."""
    if host == "*":  # every address, to waitress
        return
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if any(character.isspace() for character in host):
            raise ValueError("it has white space in it")
        socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigurationError(
            f"host is {host!r}, which is no address ({reason}): give a name or an address alone, such as 127.0.0.1, "
            "0.0.0.0 or ::1; --port takes the port"
        ) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
