"""What every table of request fields is made of.

A route's table is a pydantic model: validation, the API description and the documentation are read from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

UNKNOWN_FIELD = "unknown_field"
NOT_SERVED = "not_served"


class RequestObject(BaseModel):
    """An object whose every member is known: types are strict, and null stands for "not given"."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: Any) -> Any:
        # Before pydantic's own check, which would collect an error for each of a million unknown fields.
        if isinstance(value, Mapping):
            for name in value:
                if name not in cls.model_fields:
                    nearest = difflib.get_close_matches(name[:64], cls.model_fields, n=1)
                    raise PydanticCustomError(
                        UNKNOWN_FIELD, "unknown", {"field": name[:64], "nearest": nearest[0] if nearest else None}
                    )
        return value


class OpenObject(BaseModel):
    """An object whose known members are checked and whose further members are kept: a template may read them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Default:
    """What the server does where a field is absent or null; for the documentation.

    Attributes:
        text: a value, or a clause.
    """

    text: str


class NotServed:
    """Marks a known field that the server does not act on: it passes only at a value that means "do nothing".

    Attributes:
        instead: what the server does, as a clause that explains the refusal.
        neutral: the values that pass beside null; 1 and 1.0 are the same, 1 and true are not.
    """

    def __init__(self, instead: str, *neutral: Any) -> None:
        self.instead = instead
        self.neutral = neutral

    def check(self, value: Any) -> Any:
        """The value when it is neutral."""
        if value is None or any(_same(value, neutral) for neutral in self.neutral):
            return value
        raise PydanticCustomError(NOT_SERVED, "not served", {"instead": self.instead, "neutral": list(self.neutral)})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral], "description": f"Not served: {self.instead}."}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)
