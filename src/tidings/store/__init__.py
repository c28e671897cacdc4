"""The store protocol: how the state of a server survives a restart.

A store writes batches and returns the whole state when it is opened. A batch is written completely or not at all. One
thread at a time calls a store (`StoreWriter` has a thread for that), so its methods may block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeAlias

from tidings.core.catalog import Catalog
from tidings.core.journal import Journal
from tidings.core.model import Change, Feature, Item, Version
from tidings.errors import TidingsError
from tidings.store.durable import DurableSubscription, Key

__all__ = [
    "Batch",
    "EventRow",
    "JournalPart",
    "State",
    "Store",
    "StoreBroken",
    "StoreBusy",
    "StoreError",
    "journal_part",
]

EventRow: TypeAlias = tuple[str, str]
"""The id of an event and the name of the subscription that still has to get it; an empty name for the event itself."""

JournalPart: TypeAlias = Feature | None
"""A part of the journal with its own bounds: the changes of one feature, or (None) of all contents."""


class StoreError(TidingsError):
    """The store cannot be used, perhaps only for now. The message names the store, the reason and the remedy."""


class StoreBusy(StoreError):
    """Another server uses the store."""


class StoreBroken(StoreError):
    """A retry is useless: the file is damaged, is not a store, or was written by a newer version."""


@dataclass(slots=True)
class State:
    """Everything that a store keeps."""

    epoch: str
    """The id of the store. It never changes."""
    run: int
    """How many servers have opened the store. `open` increments it and makes that permanent."""
    items: list[Item] = field(default_factory=list)
    versions: dict[Feature, Version] = field(default_factory=dict)
    contents: dict[str, Version] = field(default_factory=dict)
    """In the order of their revisions."""
    forgotten: int = 0
    """Contents that last changed up to this revision may be missing."""
    journal: list[Change] = field(default_factory=list)
    """In the order of their revisions."""
    floors: dict[JournalPart, int] = field(default_factory=dict)
    """Changes up to this revision may be missing from the journal."""
    durables: dict[Key, DurableSubscription] = field(default_factory=dict)
    events: dict[EventRow, bytes] = field(default_factory=dict)
    """The undelivered events of the server's own code."""

    def restore(self, catalog: Catalog, journal: Journal) -> None:
        """Put the state into the catalog and the journal of a server that starts."""
        # Each process has its own revisions, because a client may know some that a killed process could not save.
        catalog.restore(self.items, self.versions, self.contents, self.run << 32, self.forgotten)
        journal.restore(self.journal, self.floors)


class Batch:
    """The changes of the state since the last batch. It has only the last definition of each item."""

    __slots__ = (
        "changes",
        "contents",
        "durables",
        "events",
        "floors",
        "forgotten",
        "items",
        "replaces_items",
        "versions",
    )

    def __init__(self) -> None:
        self.items: dict[tuple[Feature, str], Item | None] = {}
        self.replaces_items = False
        """Whether all items that are not in the batch are to be removed."""
        self.versions: dict[Feature, Version] = {}
        self.contents: dict[str, Version] = {}
        self.forgotten = 0
        """Contents that last changed up to this revision are to be removed."""
        self.changes: list[Change] = []
        self.floors: dict[JournalPart, int] = {}
        """Changes up to this revision are to be removed from the journal."""
        self.durables: dict[Key, DurableSubscription | None] = {}
        self.events: dict[EventRow, bytes | None] = {}

    def add_changes(self, changes: Iterable[Change]) -> None:
        """Add changes that are newer than all others in the batch."""
        items, versions, contents = self.items, self.versions, self.contents
        unknown: dict[JournalPart, int] = {}
        start = len(self.changes)
        self.changes += changes
        for change in islice(self.changes, start, None):
            topic = change.topic
            if isinstance(topic, Feature):
                versions[topic] = change.version
                if change.is_unknown:
                    unknown[topic] = change.revision
                else:
                    items[topic, change.key] = change.item
            else:
                contents.pop(topic, None)
                contents[topic] = change.version
        if unknown:
            self.forget(unknown, 0)

    def merge(self, later: Batch) -> None:
        """Add a batch that is newer than this one."""
        if later.replaces_items:
            self.replaces_items = True
            self.items.clear()
        self.items |= later.items
        self.versions |= later.versions
        for uri, version in later.contents.items():
            self.contents.pop(uri, None)
            self.contents[uri] = version
        self.changes += later.changes
        self.durables |= later.durables
        self.events |= later.events
        self.forget(later.floors, later.forgotten)

    def forget(self, floors: Mapping[JournalPart, int], forgotten: int) -> None:
        """Remove what the catalog and its journal have dropped: from this batch now, from the store with its write."""
        for part, floor in floors.items():
            self.floors[part] = max(floor, self.floors.get(part, 0))
        if self.changes and any(floor >= self.changes[0].revision for floor in floors.values()):
            self.changes = [each for each in self.changes if each.revision > self.floors.get(journal_part(each), 0)]
        if forgotten > self.forgotten:
            self.forgotten = forgotten
            self.contents = {uri: each for uri, each in self.contents.items() if each.revision > forgotten}

    def __bool__(self) -> bool:
        return bool(self.items or self.contents or self.durables or self.events or self.floors or self.forgotten)


class Store(Protocol):
    """Keeps the state of one server. Each method may raise `StoreError`; the store then keeps the batches before."""

    def open(self) -> State:
        """Reserve the store for this server, count the run, and return the state."""

    def write(self, batch: Batch) -> None:
        """Make a batch permanent. After an error the caller may write it again, with more in it."""

    def close(self) -> None:
        """Release the store. A second call does nothing."""


def journal_part(change: Change) -> JournalPart:
    return change.topic if isinstance(change.topic, Feature) else None
