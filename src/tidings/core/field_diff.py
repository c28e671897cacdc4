"""The differences between two definitions of an item, field by field.

A field is named by its path: `inputSchema.properties.city.type`, or `arguments[topic].required` for an element of a
list whose elements have names. Lists of other values are compared as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tidings.core.digest import canonical

__all__ = ["ABSENT", "FieldChange", "compare_fields"]

ABSENT: Final = object()
"""Stands for the value of a field that a definition does not have."""

_PLAIN_KEY = re.compile(r"[^\s.\[\]\"]+")


class FieldChange(NamedTuple):
    path: str
    before: Any
    after: Any

    def as_json(self) -> dict[str, Any]:
        values = {"before": self.before, "after": self.after}
        return {"field": self.path} | {name: value for name, value in values.items() if value is not ABSENT}


def compare_fields(before: Any, after: Any, path: str = "") -> Iterator[FieldChange]:
    """Yield the fields that differ, in the order of the definitions."""
    if before is ABSENT or after is ABSENT or canonical(before) != canonical(after):  # in Python, True == 1
        yield from _compare_members(before, after, path) or [FieldChange(path, before, after)]


def _compare_members(before: Any, after: Any, path: str) -> list[FieldChange]:
    """Return the differences of the members of two objects or lists, or nothing for other values."""
    old, new = _members(before), _members(after)
    if old is None or new is None or type(before) is not type(after):
        return []
    differences: list[FieldChange] = []
    for key in old | new:
        inner = f"{path}[{key}]" if isinstance(before, list) else _member_path(path, key)
        differences += compare_fields(old.get(key, ABSENT), new.get(key, ABSENT), inner)
    return differences


def _members(value: Any) -> dict[str, Any] | None:
    """Return the members of an object, or the elements of a list by their names, if they have unique names."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        found = {each["name"]: each for each in value if isinstance(each.get("name"), str)}
        return found if len(found) == len(value) else None
    return value if isinstance(value, dict) else None


def _member_path(path: str, key: str) -> str:
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{json.dumps(key)}]"
    return f"{path}.{key}" if path else key
