"""The one table of flags; parser, help and configuration file are made from it.

A value comes from the command line, else from the file given with ``--config``, else from the flag's environment
variable, else it is the default of the dataclass that the flag sets a field of.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pocketllm import env
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.server.config import ServerArgs
from pocketllm.types import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        name: without its dashes; also the key in a configuration file.
        owner, field: the dataclass, and its field, that the flag sets.
        kind: what its value is.
        help: one sentence.
        setting: its environment variable; a flag without one belongs to a single call and is read from the command
            line only.
        short: a shorter spelling.
        repeated: whether it may be given several times, each time with one value.
    """

    name: str
    owner: type
    field: str
    kind: env.Kind
    help: str
    setting: env.Setting | None = None
    short: str | None = None
    repeated: bool = False

    @property
    def default(self) -> Any:
        """The value when nobody gives one."""
        (found,) = (field for field in dataclasses.fields(self.owner) if field.name == self.field)
        return found.default

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Make it an option of a parser; None there means "not given"."""
        spellings = [f"--{self.name}"] + ([self.short] if self.short else [])
        action = "extend" if self.kind is env.TEXTS else "append" if self.repeated else "store"
        group.add_argument(
            *spellings,
            dest=self.field,
            metavar=self.kind.placeholder,
            action=action,
            type=self._parse,
            help=self._help().replace("%", "%%"),
        )

    def _parse(self, text: str) -> Any:
        try:
            return self.kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    def _help(self) -> str:
        facts = [] if self.default in (None, ()) else [f"default {self.kind.show(self.default)}"]
        if self.setting is not None:
            facts.append(self.setting.name)
        return f"{self.help} ({'; '.join(facts)})" if facts else self.help


def _set_by(owner: type, settings: dict[str, env.Setting], short: dict[str, str]) -> tuple[Flag, ...]:
    return tuple(
        Flag(setting.flag, owner, field, setting.kind, setting.help, setting, short.get(field))
        for field, setting in settings.items()
    )


ENGINE_FLAGS = _set_by(EngineArgs, env.ENGINE_SETTINGS, {"max_num_seqs": "-np"})
SERVER_FLAGS = _set_by(ServerArgs, env.SERVER_SETTINGS, {})
SAMPLING_FLAGS = (
    Flag("max-tokens", SamplingParams, "max_tokens", env.WHOLE, "Most tokens of the reply; otherwise what fits."),
    Flag("temperature", SamplingParams, "temperature", env.NUMBER, "0 (always the likeliest token) to 2."),
    Flag("top-p", SamplingParams, "top_p", env.NUMBER, "Draw from the likeliest tokens that sum up to this, to 1."),
    Flag("top-k", SamplingParams, "top_k", env.WHOLE, "Draw from this many likeliest tokens; 0 is off."),
    Flag("min-p", SamplingParams, "min_p", env.NUMBER, "Least probability relative to the likeliest token, 0 to 1."),
    Flag("seed", SamplingParams, "seed", env.WHOLE, "Makes a reply repeatable; otherwise one is drawn."),
    Flag("stop", SamplingParams, "stop", env.TEXT, "Text that ends the reply; may be repeated.", repeated=True),
)
LOGPROBS_FLAG = Flag(
    "logprobs", SamplingParams, "logprobs", env.WHOLE, "Log probabilities of the reply's tokens and of so many others."
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The engine's flags, and the file that may hold them."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with values for flags, such as max-queue = 64"
    )
    _add(group, ENGINE_FLAGS)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The HTTP server's flags."""
    _add(parser.add_argument_group("server"), SERVER_FLAGS)


def add_sampling_flags(parser: argparse.ArgumentParser, *further: Flag) -> None:
    """How replies are drawn; what is not given is the model's own default."""
    _add(parser.add_argument_group("sampling"), (*SAMPLING_FLAGS, *further))


def engine_args(given: argparse.Namespace) -> EngineArgs:
    """The engine's arguments from all sources; ConfigurationError when one cannot be used."""
    return EngineArgs(**_values(ENGINE_FLAGS, given))


def server_args(given: argparse.Namespace) -> ServerArgs:
    """The server's arguments from all sources; ConfigurationError when one cannot be used."""
    return ServerArgs(**_values(SERVER_FLAGS, given))


def sampling_params(given: argparse.Namespace) -> SamplingParams:
    """How replies are drawn; ConfigurationError when a value is out of range."""
    flags = (*SAMPLING_FLAGS, LOGPROBS_FLAG)
    values: dict[str, Any] = {flag.field: getattr(given, flag.field, None) for flag in flags}
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None


def read_config(path: Path) -> dict[str, Any]:
    """A configuration file's values by flag name. Every command reads the same file, so it may hold any flag.

    Raises:
        ConfigurationError: it cannot be read, is not TOML, has an unknown key or a value of the wrong type.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}: give a file that can be read") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: this is not TOML for flags: its values are nested too deeply") from None
    except ValueError as error:  # both what is no UTF-8 and what is no TOML
        raise ConfigurationError(f"{path}: this is not TOML: {error}") from None
    flags = {flag.name: flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)}
    return {key: _file_value(path, key, value, flags) for key, value in found.items()}


def _file_value(path: Path, key: str, value: Any, flags: dict[str, Flag]) -> Any:
    if key not in flags:
        near = difflib.get_close_matches(key, flags, 1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(flags)}"
        raise ConfigurationError(f"{path}: there is no key {key!r}: {advice}")
    try:
        return flags[key].kind.checked(value)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {key} is {value!r}: {error}") from None


def _add(group: argparse._ArgumentGroup, flags: Iterable[Flag]) -> None:
    for flag in flags:
        flag.add_to(group)


def _values(flags: Iterable[Flag], given: argparse.Namespace) -> dict[str, Any]:
    """What the sources say, by field; a field that none of them names is absent."""
    in_file = read_config(given.config) if given.config is not None else {}
    values = {}
    for flag in flags:
        value = getattr(given, flag.field)
        if value is None:
            value = in_file.get(flag.name)
        if value is None and flag.setting is not None:
            value = flag.setting.read()
        if value is not None:
            values[flag.field] = tuple(value) if isinstance(value, list) else value
    return values
