"""What the HTTP server is started with."""

from __future__ import annotations

from dataclasses import dataclass

from pocketllm.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The server's own settings; the engine's are `EngineArgs`.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 lets the system choose a free one.
        aliases: names of the model; the first is what replies carry, in place of the checkpoint's own.
        max_body_mb: largest request body in MB (10**6 bytes).
        request_timeout: most seconds for one request, queue included; None sets no limit.
        sse_ping_interval: seconds after which a silent stream gets a comment.
        access_log: where each request becomes a line of JSON: ``off``, ``stderr`` or a file, which is appended to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    aliases: tuple[str, ...] = ()
    max_body_mb: float = 8.0
    request_timeout: float | None = None
    sse_ping_interval: float = 30.0
    access_log: str = "off"

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port is {self.port!r}: give a whole number from 0 to 65535")
        if not isinstance(self.host, str):
            raise ConfigurationError(f"host is {self.host!r}: give an address, such as 127.0.0.1")
        if not self.host:
            raise ConfigurationError("host is empty: give an address, such as 127.0.0.1")
        if not all(self.aliases):
            raise ConfigurationError("an alias is empty: give names of at least one character")
        if not isinstance(self.access_log, str) or not self.access_log:
            raise ConfigurationError(f"access_log is {self.access_log!r}: give off, stderr or the path of a file")
        for name in ("max_body_mb", "request_timeout", "sse_ping_interval"):
            value = getattr(self, name)
            if value is None and name == "request_timeout":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name} is {value!r}: give a number above 0")
