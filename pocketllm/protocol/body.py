"""A request body's bytes as a JSON object that the rest can trust.

What leaves this module is finite, of bounded depth, without doubtful keys, and can be encoded as UTF-8 again.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

from pocketllm.errors import InvalidRequestError

MAX_DEPTH = 128
"""Objects and lists inside one another; deeper bodies are refused, so that no later walk can exhaust the stack."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` holds.

    A lone surrogate escape, which JSON allows and UTF-8 cannot hold, becomes U+FFFD: clients that cut a text in the
    middle of an emoji send it, and the rest of their text is good.

    Raises:
        InvalidRequestError: the body is no UTF-8, no JSON (NaN and infinities are none), no object, nested deeper
            than `MAX_DEPTH`, holds a number beyond double precision, or the same key twice in one object.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep() from None
    except InvalidRequestError:
        raise
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not JSON: {error}.") from None
    except ValueError:  # more digits than Python reads
        raise _too_large() from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The body is a JSON {_kind(value)}: send an object.")
    cleaned: dict[str, Any] = _clean(value, MAX_DEPTH)
    return cleaned


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"The body is not JSON: {name} is no JSON number.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(
                    f'The body has the key "{_encodable(key)[:64]}" twice in one object, and only one can be meant.'
                )
            seen.add(key)
    return value


def _clean(value: Any, depth: int) -> Any:
    """`value` with every text encodable; refuses what is too deep or not finite."""
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, dict | list):
        if depth == 0:
            raise _too_deep()
        if isinstance(value, dict):
            return {_encodable(key): _clean(item, depth - 1) for key, item in value.items()}
        return [_clean(item, depth - 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError("The body has a number beyond double precision: send finite numbers.")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise _too_large()
    return value


def _encodable(text: str) -> str:
    if text.isascii():
        return text
    return "".join(REPLACEMENT if "\ud800" <= character <= "\udfff" else character for character in text)


def _too_large() -> InvalidRequestError:
    return InvalidRequestError("The body has a whole number beyond double precision: send a smaller one.")


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"The body is nested too deeply: at most {MAX_DEPTH} objects and lists in one another.")


def _kind(value: Any) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
