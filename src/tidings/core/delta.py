"""JSON merge patches (RFC 7396) between two definitions."""

from __future__ import annotations

from typing import Any

from tidings.core.digest import canonical

__all__ = ["apply_patch", "merge_patch"]


def merge_patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """Return the patch from `before` to `after`, or None if there is none.

    In a merge patch, null removes a field, so it cannot set a field to null: a schema whose default is null has no
    patch, and the client needs the whole item.
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
        # Canonical JSON, because in Python True == 1, 1 == 1.0 and 0.0 == -0.0.
        if name in before and canonical(old) == canonical(value):
            continue
        patch[name] = _difference(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return patch
