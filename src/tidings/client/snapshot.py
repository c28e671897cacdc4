"""Immutable views of a server's lists, and the difference between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import mcp_types as types

from tidings.core.digest import ListDigest, item_hash
from tidings.core.model import Feature, Operation

__all__ = ["KEYS", "ItemChange", "ListName", "Listing", "Snapshot", "feature_of"]

ListName: TypeAlias = Literal["tools", "prompts", "resources", "templates"]
KEYS: Mapping[ListName, str] = {"tools": "name", "prompts": "name", "resources": "uri", "templates": "uri_template"}
"""The attribute that identifies an item of each list."""


def feature_of(name: ListName) -> Feature:
    return Feature.RESOURCES if name == "templates" else Feature(name)


class ItemChange(NamedTuple):
    """The difference of one item between two snapshots."""

    operation: Operation
    list: ListName
    name: str
    """The name of a tool or prompt, the URI of a resource, or the URI template of a template."""
    item: Any
    """The definition after the change; of a removed item, the last one."""
    before: Any = None
    """The definition before an update."""


class Listing:
    """One list: its items by name, in the order of their names, and a hash of each."""

    __slots__ = ("hashes", "items")

    def __init__(self, items: Mapping[str, Any], hashes: Mapping[str, bytes]) -> None:
        self.items = MappingProxyType(dict(items))
        self.hashes = dict(hashes)

    def updated(self, name: ListName, received: Iterable[Any]) -> Listing:
        """Return this listing if the items are the same, or else a new one that has the same object for each item that
        did not change."""
        found: dict[str, tuple[Any, bytes]] = {}
        for item in received:
            hashed = item_hash(_as_json(item), feature_of(name))
            key = str(getattr(item, KEYS[name]))
            found[key] = (self.items[key] if self.hashes.get(key) == hashed else item, hashed)
        hashes = {key: found[key][1] for key in sorted(found)}
        return self if hashes == self.hashes else Listing({key: found[key][0] for key in hashes}, hashes)


def _as_json(item: Any) -> Any:
    # Members that are null on the wire count; those that the SDK fills in do not.
    return item.model_dump(mode="json", by_alias=True, exclude_unset=True)


_EMPTY = Listing({}, {})


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The lists of a server at one moment. It never changes."""

    listings: Mapping[ListName, Listing]

    @classmethod
    def empty(cls) -> Snapshot:
        return cls(dict.fromkeys(KEYS, _EMPTY))

    @property
    def tools(self) -> Mapping[str, types.Tool]:
        return self.listings["tools"].items

    @property
    def prompts(self) -> Mapping[str, types.Prompt]:
        return self.listings["prompts"].items

    @property
    def resources(self) -> Mapping[str, types.Resource]:
        return self.listings["resources"].items

    @property
    def templates(self) -> Mapping[str, types.ResourceTemplate]:
        return self.listings["templates"].items

    @property
    def digest(self) -> str:
        """A digest of all lists. Equal lists have an equal digest, whatever their order on the wire."""
        parts = [self.list_digest(feature) for feature in Feature]
        return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def list_digest(self, feature: Feature) -> str:
        """Return the digest of a feature, as a Tidings server has it in its cursor."""
        total = ListDigest()
        for name, listing in self.listings.items():
            if feature_of(name) is feature:
                for hashed in listing.hashes.values():
                    total.add(hashed)
        return total.hexdigest()

    def updated(self, received: Mapping[ListName, Iterable[Any]]) -> Snapshot:
        """Return this snapshot if the received lists are the same, or else a new one."""
        listings = {name: self.listings[name].updated(name, items) for name, items in received.items()}
        if all(self.listings[name] is listing for name, listing in listings.items()):
            return self
        return Snapshot({**self.listings, **listings})

    def is_superset_of(self, other: Snapshot) -> bool:
        """Return whether this snapshot has every item of the other one, unchanged: only additions happened since."""
        return all(
            listing.hashes.items() <= self.listings[name].hashes.items() for name, listing in other.listings.items()
        )

    def changes_since(self, other: Snapshot) -> Iterator[ItemChange]:
        """Yield what differs from an older snapshot, by list and name."""
        for name, listing in self.listings.items():
            old = other.listings[name]
            if listing is old:
                continue
            for key in sorted(listing.hashes.keys() | old.hashes.keys()):
                before, after = old.items.get(key), listing.items.get(key)
                if after is None:
                    yield ItemChange(Operation.REMOVED, name, key, before)
                elif before is None:
                    yield ItemChange(Operation.ADDED, name, key, after)
                elif old.hashes[key] != listing.hashes[key]:
                    yield ItemChange(Operation.UPDATED, name, key, after, before)
