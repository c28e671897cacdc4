"""Immutable views of a server's lists and watched contents, and the difference between two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import mcp_types as types

from tidings.core.delta import apply_patch
from tidings.core.digest import ListDigest, item_hash
from tidings.core.model import Feature, Operation

__all__ = ["KEYS", "Detected", "FoundBy", "ItemChange", "ListName", "Listing", "Lists", "Snapshot"]

ListName: TypeAlias = Literal["tools", "prompts", "resources", "templates", "contents"]
"""The lists of a server, and the contents of the resources that a mirror watches."""
KEYS: Mapping[ListName, str] = {"tools": "name", "prompts": "name", "resources": "uri", "templates": "uri_template"}
"""The attribute that identifies an item of each list of the server."""
_TYPES: Mapping[ListName, Any] = {
    "tools": types.Tool,
    "prompts": types.Prompt,
    "resources": types.Resource,
    "templates": types.ResourceTemplate,
}


FoundBy: TypeAlias = Literal["notification", "poll", "reconnect"]


class Detected(NamedTuple):
    """How a mirror detected the newest change of a list."""

    found_by: FoundBy
    latency: float | None = None
    """Seconds from the notification until the mirror had the change; None if there was no notification."""


class ItemChange(NamedTuple):
    """The difference of one item between two snapshots."""

    operation: Operation
    list: ListName
    name: str
    """The name of a tool or prompt, the URI of a resource or content, or the URI template of a template."""
    item: Any
    """The definition after the change; of a removed item, the last one."""
    before: Any = None
    """The definition before an update."""
    detected: Detected | None = None


class Listing:
    """One list: its items by name, in the order of their names, with a hash of each and a digest of all."""

    __slots__ = ("detected", "digest", "hashes", "items")

    def __init__(self) -> None:
        self.items: Mapping[str, Any] = MappingProxyType({})
        self.hashes: dict[str, bytes] = {}
        self.digest = ListDigest()
        self.detected: Detected | None = None
        """Set by the mirror that publishes this listing."""

    def changed(self, changes: Mapping[str, Any]) -> Listing:
        """Return a listing with these items instead of those of the same names; None removes an item.

        It has the same objects for the other items. If nothing differs, it is this listing.
        """
        hashes, digest, items = dict(self.hashes), copy(self.digest), dict(self.items)
        for name, item in changes.items():
            old, new = hashes.pop(name, None), None if item is None else _hash(item)
            if new is not None:
                hashes[name] = new
            if new == old:
                continue
            if old is not None:
                digest.discard(old)
                del items[name]
            if new is not None:
                digest.add(new)
                items[name] = item
        if hashes == self.hashes:
            return self
        listing = Listing()
        listing.items, listing.hashes, listing.digest = MappingProxyType(dict(sorted(items.items()))), hashes, digest
        return listing


def _as_json(item: Any) -> Any:
    # Members that are null on the wire count; those that the SDK fills in do not.
    return item.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _hash(item: Any) -> bytes:
    is_resource = isinstance(item, types.Resource | types.ResourceTemplate)
    return item_hash(_as_json(item), Feature.RESOURCES if is_resource else None)


class Lists(ABC):
    """Lists by name. Each is sorted, never modified, and the same object while nothing changes."""

    @property
    @abstractmethod
    def listings(self) -> Mapping[ListName, Listing]: ...

    @property
    def tools(self) -> Mapping[str, types.Tool]:
        return self.listings["tools"].items

    @property
    def prompts(self) -> Mapping[str, types.Prompt]:
        return self.listings["prompts"].items

    @property
    def resources(self) -> Mapping[str, types.Resource]:
        """The resources by URI."""
        return self.listings["resources"].items

    @property
    def templates(self) -> Mapping[str, types.ResourceTemplate]:
        """The resource templates by URI template."""
        return self.listings["templates"].items

    @property
    def contents(self) -> Mapping[str, types.ReadResourceResult]:
        """The contents of the watched resources by URI."""
        return self.listings["contents"].items

    @property
    def digest(self) -> str:
        """A digest of all lists. Equal lists have an equal digest, whatever their order on the wire."""
        parts = [self.list_digest(feature) for feature in Feature]
        return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def list_digest(self, feature: Feature) -> str:
        """Return the digest of a feature, as a Tidings server has it in its cursor."""
        total = copy(self.listings[feature.value].digest)
        if feature is Feature.RESOURCES:
            total.include(self.listings["templates"].digest)
        return total.hexdigest()


class Snapshot(Lists):
    """The lists of a server, and the watched contents, at one moment. It never changes."""

    def __init__(self, listings: Mapping[ListName, Listing] | None = None) -> None:
        self._listings = listings or dict.fromkeys((*KEYS, "contents"), Listing())

    @property
    def listings(self) -> Mapping[ListName, Listing]:
        return self._listings

    def changed(self, changes: Mapping[ListName, Mapping[str, Any]]) -> Snapshot:
        """Return a snapshot with these items of each list; None removes one. If nothing differs, it is this one."""
        listings = {name: self.listings[name].changed(items) for name, items in changes.items()}
        if all(self.listings[name] is listing for name, listing in listings.items()):
            return self
        return Snapshot({**self.listings, **listings})

    def with_lists(self, received: Mapping[ListName, Iterable[Any]]) -> Snapshot:
        """Return a snapshot with these items, and no others, in the lists that are given."""
        changes: dict[ListName, dict[str, Any]] = {}
        for name, items in received.items():
            removed = dict.fromkeys(self.listings[name].items)
            changes[name] = removed | {getattr(item, KEYS[name]): item for item in items}
        return self.changed(changes)

    def with_delta(self, feature: Feature, digest: str, summary: Any) -> Snapshot | None:
        """Return a snapshot with the changes of a notification: `summary` is its `dev.tidings/change`.

        Return None if they do not lead to the server's list, which has this digest: the server left some out, or they
        are those of another version than this one.
        """
        try:
            changes = self._parse_delta(feature, summary)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None  # anything may be wrong in a message
        present = self.changed(changes)
        return present if summary.get("complete") and present.list_digest(feature) == digest else None

    def _parse_delta(self, feature: Feature, summary: Any) -> dict[ListName, dict[str, Any]]:
        changes: dict[ListName, dict[str, Any]] = {}
        for change in summary.get("changes", [summary]):
            name, item = change[feature.key_field], change.get("item")
            is_template = feature is Feature.RESOURCES and (name in self.templates or "uriTemplate" in (item or ()))
            list_name: ListName = "templates" if is_template else feature.value
            if "delta" in change:
                item = apply_patch(_as_json(self.listings[list_name].items[name]), change["delta"])
            changes.setdefault(list_name, {})[name] = item and _TYPES[list_name].model_validate(item)
        return changes

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
            for key in sorted({key for key, _ in listing.hashes.items() ^ old.hashes.items()}):
                before, after = old.items.get(key), listing.items.get(key)
                if after is None:
                    yield ItemChange(Operation.REMOVED, name, key, before, None, listing.detected)
                elif before is None:
                    yield ItemChange(Operation.ADDED, name, key, after, None, listing.detected)
                else:
                    yield ItemChange(Operation.UPDATED, name, key, after, before, listing.detected)
