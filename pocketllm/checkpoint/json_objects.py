"""JSON objects in a checkpoint's files: bounded in size and depth, and without a key twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from pocketllm.checkpoint.mapped import MappedFile
from pocketllm.checkpoint.sniff import SNIFF_BYTES, describe_content
from pocketllm.errors import CheckpointError

# A header of all 90,000 tensors of the largest mixture of experts takes 12 MB. The bound keeps what a crafted file
# can cost small: parsed JSON takes up to twenty times its bytes.
MAX_JSON_BYTES = 32 << 20


def read_json_object(file: MappedFile) -> dict[str, Any]:
    """Read a JSON object from a file of UTF-8 text.

    The numbers NaN and Infinity are read as Python writes them, and in the spelling ``{"__float__": "Infinity"}`` that
    transformers uses.

    Raises:
        CheckpointError: the file is too large, or holds no JSON object, a key twice, or is nested too deep.
    """
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file.path}: {file.size} bytes of JSON; more than {MAX_JSON_BYTES} are not read")
    return parse_json_object(file, file.read(0, file.size), "the file")


def parse_json_object(file: MappedFile, text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in a part of a file, called `what` in messages; otherwise as `read_json_object`."""

    def checked(pairs: list[tuple[str, Any]]) -> Any:
        members = dict(pairs)
        if len(members) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{file.path}: {what} has the key {brief(twice)!r} twice")
        if members.keys() == {"__float__"} and members["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(members["__float__"])
        return members

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=checked)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{file.path}: {what} is JSON nested too deep to be read") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        found = describe_content(file.read(0, SNIFF_BYTES)) if what == "the file" else "it is damaged"
        raise CheckpointError(f"{file.path}: {what} is no valid JSON ({error}); {found}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file.path}: {what} holds JSON, but no object {{...}} at its top")
    return parsed


def brief(value: Any) -> str:
    """A value from a damaged header, cut to what fits a message."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
