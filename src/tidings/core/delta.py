"""JSON merge patches (RFC 7396) between two definitions, and their use by a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidings.core.digest import ListDigest, canonical, item_hash, split_digest
from tidings.core.model import Feature, item_key

__all__ = ["Copy", "apply_patch", "merge_patch"]


class Copy:
    """A client's copy of one list, updated by notifications and verified at each step.

    For clients that get deltas: with `detail: "delta"`, or with the extension `dev.tidings/changes`. The copy of
    `resources` holds the templates too.
    """

    def __init__(self, feature: Feature | str, items: Iterable[dict[str, Any]] = ()) -> None:
        self.feature = Feature(feature)
        self.items: dict[str, dict[str, Any]] = {}
        self._hashes: dict[str, bytes] = {}
        for item in items:
            self._put(item_key(self.feature, item), item)

    @property
    def digest(self) -> str:
        """The digest of the list, as in its cursor."""
        total = ListDigest()
        for hashed in self._hashes.values():
            total.add(hashed)
        return total.hexdigest()

    def apply(self, summary: Mapping[str, Any]) -> bool:
        """Apply the `dev.tidings/change` of a notification.

        Return False if the client must fetch the list: the server no longer had all changes, or the digest differs.
        """
        if not summary.get("complete"):
            return False
        changes = summary.get("changes", [summary] if "operation" in summary else [])
        return all(map(self._apply, changes)) and self.digest == split_digest(summary["digest"])[0]

    def _apply(self, change: Mapping[str, Any]) -> bool:
        key = change[self.feature.key_field]
        if "item" in change:
            self._put(key, change["item"])
        elif "delta" in change:
            if key not in self.items or _digest(self._hashes[key]) != change["before"]:
                return False
            self._put(key, apply_patch(self.items[key], change["delta"]))
            return bool(_digest(self._hashes[key]) == change["after"])
        else:
            self.items.pop(key, None)
            self._hashes.pop(key, None)
        return True

    def _put(self, key: str, item: dict[str, Any]) -> None:
        self.items[key], self._hashes[key] = item, item_hash(item, self.feature)


def _digest(hashed: bytes) -> str:
    return hashed[:16].hex()


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
