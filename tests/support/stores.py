"""The part of a server that makes batches for its store, without threads; its store, filled, written, or killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidings import Catalog, Feature, Journal, Policy
from tidings.store import Batch, Store
from tidings.store.durable import DurableSubscription
from tidings.store.sqlite import SQLiteStore


class Server:
    """The part of a server that makes batches, without threads."""

    def __init__(self, store: Store, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.store = store
        self.clock = 1000.0
        self.begin()

    def begin(self) -> None:
        self.state = state = self.store.open()
        self.catalog = Catalog(self.policy, clock=lambda: self.clock)
        self.catalog.restore(state.items, state.versions, state.contents, state.run << 32)
        self.journal = Journal(self.policy)
        self.journal.restore(state.journal, state.floors)
        self.batch = Batch()
        self.catalog.follow(self.batch.add_changes)
        self.catalog.follow(self.journal.append)

    def write(self, durables: dict[Any, DurableSubscription | None] | None = None) -> None:
        self.batch.durables.update(durables or {})
        self.batch.forget(self.journal.floors(), self.catalog.resources.forgotten)
        self.store.write(self.batch)
        self.batch.__init__()  # type: ignore[misc]

    def shown(self) -> dict[str, Any]:
        """What a client could ever find out."""
        return {
            "items": {feature: self.catalog.items(feature).snapshot() for feature in Feature},
            "versions": {feature: self.catalog.version(feature) for feature in Feature},
            "contents": self.catalog.resources.contents(),
            "journal": self.journal.since(max(self.journal.floors().values())),
            "floors": self.journal.floors(),
        }


def fill(server: Server) -> None:
    catalog = server.catalog
    catalog.tools.replace([{"name": "a", "title": "1"}, {"name": "b"}, {"name": "ü"}])
    catalog.tools.update("a", title="2")
    catalog.tools.remove("b")
    catalog.prompts.add({"name": "tools"})
    catalog.resources.add({"uri": "tools", "name": "a resource whose URI is a feature's name"})
    catalog.resources.updated("tools", etag="1", size=3, nested={"a": [1, None, "ü", 2**63]})
    catalog.resources.updated("file:///a")
    catalog.resources.deleted("file:///b")


def die(store: Store) -> None:
    """What is left of a store when its process is killed: the connection is gone without a word, and so is the lock."""
    assert isinstance(store, SQLiteStore)
    assert store._db is not None
    store._db.close()
    store._db = None
    store.close()


def written(path: Path) -> dict[str, Any]:
    server = Server(SQLiteStore(path))
    fill(server)
    server.write()
    shown = server.shown()
    server.store.close()
    return shown


def shown_in(path: Path, policy: Policy | None = None) -> dict[str, Any]:
    """Return what a server that starts with this file shows."""
    server = Server(SQLiteStore(path), policy)
    server.store.close()
    return server.shown()
