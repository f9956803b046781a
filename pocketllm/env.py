"""Every environment variable that PocketLLM reads, in one table.

A variable is parsed when it is asked for; a value that cannot be used raises `ConfigurationError`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Kind:
    """What the value of a setting is, in text (environment, command line) and as a value (TOML).

    Attributes:
        noun: what to give, for messages.
        placeholder: stands for the value in help texts.
        parse: from text to value; ValueError says what to give.
        types: what a value may be; booleans are no numbers.
        show: from value to text.
    """

    noun: str
    placeholder: str
    parse: Callable[[str], Any]
    types: tuple[type, ...]
    show: Callable[[Any], str] = str

    def checked(self, value: Any) -> Any:
        """A value that arrived as a value; ValueError when it has another type."""
        if isinstance(value, bool) is not (bool in self.types) or not isinstance(value, self.types):
            raise ValueError(f"give {self.noun}")
        if isinstance(value, list):
            if not all(isinstance(item, str) for item in value):
                raise ValueError(f"give {self.noun}")
            return tuple(value)
        return (value,) if list in self.types else value


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Attributes:
        name: as it stands in the environment.
        parse: from its text to its value; ValueError says what is wrong with the text.
        default: called when the variable is unset or empty.
        help: one sentence for the documentation.
    """

    name: str
    parse: Callable[[str], Any]
    default: Callable[[], Any]
    help: str

    def read(self) -> Any:
        """The value, or the default; ConfigurationError when the text cannot be used."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigurationError(f"environment variable {self.name}={text!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Setting(Variable):
    """A variable that stands in for a flag of the same name; unset, it leaves the default to the flag's owner.

    Attributes:
        kind: what its value is.
    """

    kind: Kind

    @property
    def flag(self) -> str:
        """The flag without its dashes, which is also the key of a configuration file."""
        return self.name.removeprefix(_PREFIX).lower().replace("_", "-")


_PREFIX = "POCKETLLM_"


def _unset() -> None:
    return None


def _setting(name: str, kind: Kind, help: str) -> Setting:
    return Setting(_PREFIX + name, kind.parse, _unset, help, kind)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("give a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("give a number") from None


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("give on or off")
    return text == "on"


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


TEXT = Kind("text", "TEXT", str, (str,))
WHOLE = Kind("a whole number", "N", _whole, (int,))
NUMBER = Kind("a number", "X", _number, (int, float))
SWITCH = Kind("true or false", "on|off", _switch, (bool,), lambda value: "on" if value else "off")
TEXTS = Kind("text, or a list of texts", "TEXT[,TEXT]", _texts, (str, list))


def _default_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pocketllm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pocketllm"


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # "~name" of nobody here
        raise ValueError("its home folder is not known: give the path of a folder") from None


def _gibibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise ValueError("give gibibytes, a number of at least 0")
    return value


CACHE_DIR = Variable(
    "POCKETLLM_CACHE_DIR",
    _folder,
    _default_cache,
    "Folder for pulled models and compiled kernels.",
)
MEMORY_RESERVE_GIB = Variable(
    "POCKETLLM_MEMORY_RESERVE_GIB",
    _gibibytes,
    lambda: None,
    "Memory in GiB that the KV cache leaves free; by default a tenth of the machine's, at least 2.",
)
SEED_SALT = Variable(
    "POCKETLLM_SEED_SALT",
    str,
    lambda: None,
    "Any text; requests without a seed then derive theirs from it and their prompt instead of drawing one.",
)

MODEL = _setting("MODEL", TEXT, "Name, path or Hugging Face id of the model.")
BACKEND = _setting("BACKEND", TEXT, "What computes: auto, torch, triton, cupy, numba or cpp.")
DEVICE = _setting("DEVICE", TEXT, "Where it computes: auto, cpu or cuda[:i].")
DTYPE = _setting("DTYPE", TEXT, "Type of activations: auto, float32 or bfloat16.")
MAX_MODEL_LEN = _setting("MAX_MODEL_LEN", WHOLE, "Context window of one request in tokens, prompt and reply together.")
PARALLEL = _setting("PARALLEL", WHOLE, "How many sequences share a step (max_num_seqs).")
MAX_QUEUE = _setting("MAX_QUEUE", WHOLE, "How many requests may wait; one more is refused.")
PREFILL_CHUNK = _setting("PREFILL_CHUNK", WHOLE, "Most prompt tokens that one step computes.")
DECODE_SHARE = _setting("DECODE_SHARE", NUMBER, "Share of each prefill chunk's time for running replies, 0 to 1.")
BLOCK_SIZE = _setting("BLOCK_SIZE", WHOLE, "Tokens of one KV block.")
KV_CACHE_MIB = _setting("KV_CACHE_MIB", WHOLE, "Memory of the KV cache in MiB; otherwise what is free less a reserve.")
PREFIX_CACHE = _setting("PREFIX_CACHE", SWITCH, "Whether prompts that begin alike are computed once: on or off.")
THREADS = _setting("THREADS", WHOLE, "CPU threads; otherwise the backend's own choice.")
STEP_TIMEOUT = _setting("STEP_TIMEOUT", NUMBER, "Seconds after which a step that hangs makes the engine give up.")
HOST = _setting("HOST", TEXT, "Address to listen on.")
PORT = _setting("PORT", WHOLE, "Port to listen on; 0 lets the system choose a free one.")
ALIAS = _setting("ALIAS", TEXTS, "Names of the model for clients; replies carry the first.")
REQUEST_TIMEOUT = _setting("REQUEST_TIMEOUT", NUMBER, "Most seconds for one request, its waiting included.")
MAX_BODY_MB = _setting("MAX_BODY_MB", NUMBER, "Largest request body in MB (10^6 bytes).")
SSE_PING_INTERVAL = _setting("SSE_PING_INTERVAL", NUMBER, "Seconds after which a silent stream gets a comment.")
ACCESS_LOG = _setting("ACCESS_LOG", TEXT, "Where each request becomes a line of JSON: off, stderr or a file.")

ENGINE_SETTINGS = {
    "model": MODEL,
    "backend": BACKEND,
    "device": DEVICE,
    "dtype": DTYPE,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": PARALLEL,
    "max_queue": MAX_QUEUE,
    "prefill_chunk": PREFILL_CHUNK,
    "decode_share": DECODE_SHARE,
    "block_size": BLOCK_SIZE,
    "kv_cache_mib": KV_CACHE_MIB,
    "prefix_cache": PREFIX_CACHE,
    "threads": THREADS,
    "step_timeout": STEP_TIMEOUT,
}
"""By the field of `EngineArgs` that each sets."""

SERVER_SETTINGS = {
    "host": HOST,
    "port": PORT,
    "aliases": ALIAS,
    "request_timeout": REQUEST_TIMEOUT,
    "max_body_mb": MAX_BODY_MB,
    "sse_ping_interval": SSE_PING_INTERVAL,
    "access_log": ACCESS_LOG,
}
"""By the field of `ServerArgs` that each sets."""

VARIABLES = (CACHE_DIR, MEMORY_RESERVE_GIB, SEED_SALT, *ENGINE_SETTINGS.values(), *SERVER_SETTINGS.values())
