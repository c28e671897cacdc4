"""Where a server's state survives it: the catalog, the journal and the durable subscriptions.

A store is told of batches and gives back, once at a start, all that it was told. It is called from one thread at a
time, may block, and knows no event loop: `StoreWriter` calls it from its own thread. What is in a batch becomes lasting
altogether or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeAlias

from tidings.core.model import Change, Feature, Item, Version
from tidings.errors import TidingsError
from tidings.store.durable import DurableSubscription, Key

__all__ = ["Batch", "History", "State", "Store", "StoreBroken", "StoreBusy", "StoreError", "journal_part"]

History: TypeAlias = Feature | None
"""One of the journal's histories: a feature's, or (None) that of all contents."""


class StoreError(TidingsError):
    """The store can't be used, or not for now; the message says which one, why, and what to do."""


class StoreBusy(StoreError):
    """Another server has it."""


class StoreBroken(StoreError):
    """There is no use in trying again: the file is damaged, newer than this version, or not ours."""


@dataclass(slots=True)
class State:
    """All that a server knew."""

    epoch: str
    """The store's own id, for as long as it exists."""
    run: int
    """How many servers have begun with this store. Counted up before `open` returns, for good."""
    items: list[Item] = field(default_factory=list)
    versions: dict[Feature, Version] = field(default_factory=dict)
    contents: dict[str, Version] = field(default_factory=dict)
    """The one longest unchanged first."""
    forgotten: int = 0
    """The revision until which contents may have been forgotten."""
    journal: list[Change] = field(default_factory=list)
    """In the order of their revisions."""
    floors: dict[History, int] = field(default_factory=dict)
    """Of what was until this revision, the journal has forgotten some."""
    durables: dict[Key, DurableSubscription] = field(default_factory=dict)


class Batch:
    """What became of the state since the last batch. Folds: of an item only its last definition counts."""

    __slots__ = ("changes", "contents", "durables", "floors", "forgotten", "items", "replaces_items", "versions")

    def __init__(self) -> None:
        self.items: dict[tuple[Feature, str], Item | None] = {}
        self.replaces_items = False
        """Whether there are no other items than these."""
        self.versions: dict[Feature, Version] = {}
        self.contents: dict[str, Version] = {}
        self.forgotten = 0
        """Contents that did not change after this revision are to be forgotten."""
        self.changes: list[Change] = []
        self.floors: dict[History, int] = {}
        """Changes up to and with this revision are to be forgotten."""
        self.durables: dict[Key, DurableSubscription | None] = {}

    def take(self, changes: Iterable[Change]) -> None:
        """Fold in changes that came after all that it holds."""
        items, versions, contents = self.items, self.versions, self.contents
        start = len(self.changes)
        self.changes += changes
        for change in islice(self.changes, start, None):
            topic = change.topic
            if isinstance(topic, Feature):
                items[topic, change.key] = change.item
                versions[topic] = change.version
            else:
                if topic in contents:
                    del contents[topic]
                contents[topic] = change.version

    def add(self, later: Batch) -> None:
        """Fold in a whole batch that came after this one."""
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
        self.forget(later.floors, later.forgotten)

    def forget(self, floors: Mapping[History, int], forgotten: int) -> None:
        """Take in what the catalog and its journal have forgotten, which needs no writing either."""
        self.floors.update(floors)
        if self.changes and any(floor >= self.changes[0].revision for floor in floors.values()):
            self.changes = [each for each in self.changes if each.revision > self.floors.get(journal_part(each), 0)]
        if forgotten > self.forgotten:
            self.forgotten = forgotten
            self.contents = {uri: each for uri, each in self.contents.items() if each.revision > forgotten}

    def __bool__(self) -> bool:
        return bool(self.items or self.contents or self.durables or self.floors or self.forgotten)


class Store(Protocol):
    """Keeps a state. Every method may raise `StoreError`, and what was written before then stays."""

    def open(self) -> State:
        """Take hold of it for this server, begin a new life, and load what there is."""

    def write(self, batch: Batch) -> None:
        """Make a batch lasting. One that could not be written may be written again, with more in it."""

    def close(self) -> None:
        """Let go of it. Closing twice is fine."""


def journal_part(change: Change) -> History:
    return change.topic if isinstance(change.topic, Feature) else None
