"""A server without network and threads that keeps its state in a store, and helpers for its SQLite file."""

from __future__ import annotations

import shutil
import sqlite3
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.memory_store import MemoryStore
from tidings import Catalog, Feature, Hub, Journal, Policy
from tidings.sdk.uri_templates import read_template
from tidings.store import Batch, Store
from tidings.store.durable import DurableSubscription, Key
from tidings.store.durable_registry import DurableSubscriptions
from tidings.store.sqlite import SQLiteStore

_numbers = count()


class StoredServer:
    """The catalog, hub and durable subscriptions of a server, and the batch of what is not written yet."""

    def __init__(self, store: Store | Path | None = None, **settings: Any) -> None:
        self.policy = Policy(**settings)
        self.store: Store = SQLiteStore(store) if isinstance(store, Path) else store or MemoryStore()
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        self.state = state = self.store.open()
        self.catalog = Catalog(self.policy, clock=lambda: self.now)
        self.journal = Journal(self.policy)
        state.restore(self.catalog, self.journal)
        self.batch = Batch()
        self.catalog.follow(lambda changes: self.batch.add_changes(changes))  # noqa: PLW0108  # the batch of that time
        self.hub = Hub(self.catalog, journal=self.journal, clock=lambda: self.now, templates=read_template)
        self.durables = DurableSubscriptions(self.hub, state.durables.values())
        self.durables.on_unsaved(lambda: True)

    def write(self, durables: dict[Key, DurableSubscription | None] | None = None) -> None:
        """Write all changes, and additional records."""
        self.batch.durables.update(self.durables.collect_unsaved())
        self.batch.durables.update(durables or {})
        self.batch.forget(self.journal.floors(), self.catalog.resources.forgotten)
        self.store.write(self.batch)
        self.batch = Batch()
        self.durables.confirm_written()

    def restart(self, *, is_killed: bool = False) -> None:
        """Start again with what was written. `is_killed` leaves the file as a killed process leaves it."""
        store = self.store
        if isinstance(store, SQLiteStore):
            self.store = SQLiteStore(copy_open_file(store.path) if is_killed else store.path)
        store.close()
        self.start()

    def kill(self) -> None:
        self.restart(is_killed=True)

    def confirm_all(self) -> None:
        """Let enough time pass for everything that clients were told to count as received."""
        self.now += 2 * (self.policy.write_deadline + self.policy.keep_alive)

    def add_tools(self, *names: str) -> None:
        for name in names:
            self.catalog.tools.add({"name": name})

    def visible_state(self) -> dict[str, Any]:
        """Return everything that a client could find out."""
        return {
            "items": {feature: self.catalog.items(feature).snapshot() for feature in Feature},
            "versions": {feature: self.catalog.version(feature) for feature in Feature},
            "contents": self.catalog.resources.contents(),
            "journal": self.journal.since(max(self.journal.floors().values())),
            "floors": self.journal.floors(),
        }

    def close(self) -> dict[str, Any]:
        """Close the store, and return the visible state."""
        self.store.close()
        return self.visible_state()


def fill(server: StoredServer) -> None:
    """Make changes of every kind."""
    catalog = server.catalog
    catalog.tools.replace([{"name": "a", "title": "1"}, {"name": "b"}, {"name": "ü"}])
    catalog.tools.update("a", title="2")
    catalog.tools.remove("b")
    catalog.prompts.add({"name": "tools"})
    catalog.resources.add({"uri": "tools", "name": "a resource whose URI is a feature's name"})
    catalog.resources.updated("tools", etag="1", size=3, nested={"a": [1, None, "ü", 2**63]})
    catalog.resources.updated("file:///a")
    catalog.resources.deleted("file:///b")


def create_file(path: Path) -> dict[str, Any]:
    """Create a state file with changes of every kind, and return the visible state."""
    server = StoredServer(path)
    fill(server)
    server.write()
    return server.close()


def state_after_restart(path: Path, **settings: Any) -> dict[str, Any]:
    """Return the visible state of a server that starts with this file."""
    return StoredServer(path, **settings).close()


def copy_open_file(path: Path) -> Path:
    """Copy a file that is in use, with its write-ahead log: what is left when the process is killed now."""
    copy = path.with_name(f"killed{next(_numbers)}.db")
    for end in ("", "-wal"):
        shutil.copyfile(f"{path}{end}", f"{copy}{end}")
    return copy


def deny(db: sqlite3.Connection, name: str) -> None:
    """Let every statement of a connection fail that uses this table or pragma."""
    db.set_authorizer(lambda _, argument, *rest: sqlite3.SQLITE_DENY if argument == name else sqlite3.SQLITE_OK)
