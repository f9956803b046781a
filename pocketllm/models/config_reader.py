"""Reading a configuration so that nothing which changes the arithmetic goes unnoticed.

Every key is asked for by name and type. When a family has asked for all it understands, `ConfigReader.finish` refuses
whatever is left, unless the key is known not to change the arithmetic or has a value that means "off".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pocketllm.errors import CheckpointError

_LARGEST = 2**31 - 1

# Keys of config.json that say how a model was trained, stored or described, not what it computes.
_INERT_HF = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


class ConfigReader:
    """One (nested) configuration mapping and the keys that were asked for.

    Attributes:
        raw: the mapping.
        where: its place in the file, for messages; "" at the top.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self.where = where
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` when the key is absent or null."""
        self._asked.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        """A whole number within its bounds; required when there is no default."""
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {value!r}, not a whole number")
        if not least <= value <= most:
            raise self.error(key, f"is {value}, outside {least} to {most}")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = 0.0, least: float = 1e-12, most: float = 1e12
    ) -> float:
        """A number greater than `above` and, apart from its sign, from `least` to `most`, or zero.

        No model has others, and arithmetic on them would overflow. Required when there is no default.
        """
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"is {value!r}, not a finite number")
        if value <= above:
            raise self.error(key, f"is {value!r}, not above {above:g}")
        if value and not least <= abs(value) <= most:
            raise self.error(key, f"is {value!r}, outside {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, neither true nor false")
        return value

    def expect(self, key: str, allowed: Iterable[Any], default: Any) -> Any:
        """A value of a short list; anything else changes the arithmetic in a way that is not implemented."""
        value = self.get(key, default)
        choices = list(allowed)
        if value not in choices:
            raise self.error(key, f"is {value!r}; supported: {', '.join(map(repr, choices))}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.get(key, [])
        ids = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, f"is {value!r}, not a token id or a list of them")
        return tuple(ids)

    def nested(self, key: str) -> ConfigReader | None:
        """The mapping under `key`, or None when it is absent, null or empty."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {value!r}, not an object")
        return ConfigReader(value, f"{self.where}{key}.") if value else None

    def ignore(self, *keys: str) -> None:
        """Keys that this family has looked at and that do not change what it computes."""
        self._asked.update(keys)

    def finish(self, prefix: str = "") -> None:
        """Refuse every key beginning with `prefix` that nobody asked for.

        Keys pass that are inert, private (``_name``) or have a value that switches something off.
        """
        for key in self.raw:
            if key in self._asked or key in _INERT_HF or key.startswith("_") or not key.startswith(prefix):
                continue
            if self.raw[key] in (None, False, "", [], {}):
                continue
            raise self.error(key, f"({self.raw[key]!r}) is not understood and may change what the model computes")

    def error(self, key: str, what: str) -> CheckpointError:
        """An error about `key`, to be raised."""
        return CheckpointError(f"configuration key '{self.where}{key}' {what}")
