"""A client's copy of a list that is updated by deltas, as docs/filters.md describes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidings.core.delta import apply_patch
from tidings.core.digest import ListDigest, item_hash, split_digest
from tidings.core.model import Feature, item_key


class Copy:
    """A list, updated by the notifications of a client and verified at each step. That of `resources` holds the
    templates too."""

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
