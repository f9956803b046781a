"""JSON as every reply is written: compact, in the text's own characters, never NaN or an infinity."""

from __future__ import annotations

import json
from typing import Any


def dumps(value: Any) -> str:
    """`value` as JSON; ValueError for a number that JSON lacks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
