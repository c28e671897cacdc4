"""What differs between two definitions, as a JSON merge patch (RFC 7396)."""

from __future__ import annotations

from typing import Any

__all__ = ["apply_patch", "merge_patch"]


def merge_patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """The patch that leads from `before` to `after`; None where there is none.

    A merge patch writes null for "take this field away", so it can't set a field to null: a schema whose default is
    null has no patch, and its reader needs the whole item.
    """
    patch = _difference(before, after)
    return patch if apply_patch(before, patch) == after else None


def apply_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply_patch(merged.get(name), value)
    return merged


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = dict.fromkeys(name for name in before if name not in after)
    for name, value in after.items():
        old = before.get(name)
        if name in before and _same(old, value):
            continue
        patch[name] = _difference(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return patch


def _same(one: Any, other: Any) -> bool:
    # True == 1 and 1 == 1.0 in Python, but not in a digest.
    return type(one) is type(other) and one == other if not isinstance(one, dict | list) else _same_nested(one, other)


def _same_nested(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(name in other and _same(value, other[name]) for name, value in one.items())
    return all(map(_same, one, other))
