"""One replica of a cluster: keeps its items in the shared table, and the catalog that its clients see equal to it.

A change of this server is written to the table, and applied when it comes back from there, as on all other replicas. So
all replicas apply the same changes in the same order. While the table cannot be reached, clients see the last known
state and the changes of this server; when it is back, the differences are written.

The writes are level-triggered: when the table gets another value for an item of this replica than its own catalog has,
the item is written again. A network can deliver a write of an old connection after newer ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from mcp.server import Server

from tidings.cluster.backend import Backend, Entry, OnProgress, TooLarge, Unavailable, Write
from tidings.cluster.calls import handle
from tidings.cluster.middleware import ClusterMiddleware
from tidings.cluster.shared_durables import KIND as DURABLE
from tidings.cluster.shared_durables import SharedDurables
from tidings.cluster.shared_state import (
    ReplicaInfo,
    SharedState,
    content_write,
    item_write,
    leave_write,
    replica_write,
    unknown_write,
)
from tidings.core.catalog import Catalog
from tidings.core.digest import split_digest
from tidings.core.hub import Hub
from tidings.core.model import Change, Feature, Version
from tidings.server.list_reader import ListReader
from tidings.server.loop_bridge import LoopBridge
from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["Replica"]

logger = logging.getLogger(__name__)

_LEASE = 3.0
"""Seconds after which the items of a replica that does not answer are removed. It renews its entry three times as
often: one renewal that is late or lost has no effect."""

_CLEAN_UP_DELAY = 60.0
"""Seconds after which the items of a replica that is gone are removed from the table. A replica that was only paused
needs one write to have its items again."""

_LEAVE_TIMEOUT = 1.0
"""Seconds that the end of a server waits for the table."""

_CATCH_UP_TIMEOUT = 2.0
"""Seconds that a client waits that has seen a newer state on another replica."""


class Replica:
    """The membership of one server in a cluster. The server's name is that of the cluster."""

    def __init__(
        self,
        backend: Backend,
        server: Server[Any],
        own: Catalog,
        hub: Hub,
        durables: DurableSubscriptions,
        bridge: LoopBridge,
        reader: ListReader,
    ) -> None:
        self.id = secrets.token_hex(6)
        self._backend = backend
        self._server = server
        self._own = own
        self._hub = hub
        self._bridge = bridge
        self._reader = reader
        self.state = SharedState(hub.catalog, self.id)
        self._durables = SharedDurables(durables, backend, bridge, self.id, lambda: self.state.replicas)
        self.lost_reason: str | None = "it has not been reached yet"
        """Why the table can't be reached; None if it can."""
        self._lock = threading.Lock()
        self._writes: dict[str, Write] = {}
        """The changes that are not written yet, or are being written, by key."""
        self._stored: dict[str, int] = {}
        """The orders of the last writes of own items. The table sends each of them back, perhaps after older ones."""
        self._has_work = asyncio.Event()
        self._applied = asyncio.Event()
        self.is_running = False
        """Whether it is connected, or tries to be."""
        self._is_joined = False
        """Whether the entry of this replica was written, and has not expired since."""
        self._dead: dict[str, float] = {}
        """The replicas that are gone, and since when."""
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        own.follow(self._on_changes)
        server.middleware.append(ClusterMiddleware(backend, self.state, own, hub, reader))

    # On any thread

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        # With the lock of the own catalog, so the writes of a key are in the order of its changes.
        writes = [self._write_of(change) for change in changes]
        with self._lock:
            for write in writes:
                self._writes.pop(write.key, None)  # so that all keys are in the order of their latest changes
                self._writes[write.key] = write
        self._bridge.call(self._wake, writes)

    def _write_of(self, change: Change) -> Write:
        topic = change.topic
        if not isinstance(topic, Feature):
            return content_write(topic, change.digest, change.metadata, change.trace)
        if change.is_unknown:
            return unknown_write(topic, split_digest(change.digest)[1])
        return item_write(self.id, topic, change.key, change.item, change.trace)

    def count_reachable(self) -> int:
        """Return the number of replicas that are alive; 0 if the cluster can't be reached."""
        return 0 if self.lost_reason is not None else len(self.state.replicas)

    def list_replicas(self) -> list[tuple[str, ReplicaInfo, int]]:
        """Return the replicas that are alive, with the writes that each had not applied when it last reported."""
        reported = self.state.reported
        return [
            (name, info, max(0, reported.get(name, 0) - 1 - info.applied))
            for name, info in sorted(self.state.replicas.items())
        ]

    # On the event loop

    def _wake(self, writes: Sequence[Write]) -> None:
        if self.lost_reason is not None:
            self._apply_locally(writes)
        self._has_work.set()

    def _apply_locally(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self.state.apply_locally(write)

    async def run(self) -> None:
        """Take part in the cluster until cancelled."""
        self.is_running = True
        # An event belongs to one event loop, and the server may run again on another one.
        self._has_work, self._applied = asyncio.Event(), asyncio.Event()
        self._has_work.set()
        connection = asyncio.create_task(self._backend.run(self._server.name, self.id, self, self._handle_call))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_changes())
                tasks.create_task(self._renew())
                tasks.create_task(self._durables.run())
        finally:
            # A server may be stopped twice: the second time must not interrupt this.
            await asyncio.shield(self._leave(connection))

    async def _leave(self, connection: asyncio.Task[None]) -> None:
        try:
            with suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT):
                    await self._durables.write()
                    await self._backend.write([leave_write(self.id)])
        finally:
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)
            self.is_running = False

    async def _write_changes(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            if self.lost_reason is not None:
                continue  # `load` or `apply` wakes this up
            with self._lock:
                writes = list(self._writes.values())
            try:
                stored = await self._write([write for write in writes if not self.state.is_written(write)])
                with self._lock:
                    for write in writes:
                        if self._writes.get(write.key) is write:  # it has not changed again meanwhile
                            del self._writes[write.key]
                self._stored |= stored
                self._check_own(stored)
                if not self._is_joined:
                    await self._join()
            except Unavailable as error:
                logger.debug("changes could not be written: %s", error)
                if self.lost_reason is None:
                    await asyncio.sleep(_LEASE / 3)
                    self._has_work.set()

    async def _write(self, writes: Sequence[Write]) -> dict[str, int]:
        """Write to the table, and return the orders of the items. Leave out what is too large for the table: only the
        clients of this replica see that."""
        try:
            orders = await self._backend.write(writes)
        except TooLarge:
            orders = [await self._write_one(write) for write in writes]
        return {
            write.key: order
            for write, order in zip(writes, orders, strict=True)
            if order is not None and self._is_own(write.key)
        }

    async def _write_one(self, write: Write) -> int | None:
        try:
            return (await self._backend.write([write]))[0]
        except TooLarge as error:
            self._hub.counts.failures["items left out"] += 1
            logger.error("other replicas will not have an item: %s", error)
            self.state.apply_locally(write)
            return None

    def _is_own(self, key: str) -> bool:
        return key.startswith(f"item/{self.id}/")

    def _own_write(self, key: str) -> Write:
        """Return the write of the own item with this key, or of its removal."""
        _, _, feature, name = key.split("/", 3)
        items = self._own.items(feature)
        return item_write(self.id, items.feature, name, items.item(name))

    def _is_coming(self, key: str) -> bool:
        """Return whether the table will send back a write of an own item."""
        return self._stored.get(key, 0) > self.state.order

    def _check_own(self, keys: Iterable[str]) -> None:
        """Write own items again if the table has other values for them, and no newer write of them is on its way."""
        with self._own.lock, self._lock:
            for key in keys:
                if key in self._writes or self._is_coming(key):
                    continue
                self._stored.pop(key, None)
                with suppress(ValueError):  # not a key that a replica writes
                    write = self._own_write(key)
                    if not self.state.is_written(write):
                        self._writes[key] = write
                        self._has_work.set()

    async def _join(self) -> None:
        await self._backend.write([replica_write(self.id, self._describe(), _LEASE)])
        self._is_joined = True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_LEASE / 3)
            if self._is_joined and self.lost_reason is None:
                with suppress(Unavailable):
                    await self._backend.write([replica_write(self.id, self._describe(), _LEASE), *self._clean_up()])
                    self._durables.check_holders()

    def _clean_up(self) -> list[Write]:
        """Return the removals of the items of replicas that are gone for long. One replica does that for all."""
        now, dead = time.monotonic(), self.state.dead_replicas()
        self._dead = {replica: self._dead.get(replica, now) for replica in dead}
        if self.id != min(self.state.replicas, default=None):
            return []
        due = [replica for replica, since in self._dead.items() if now - since >= _CLEAN_UP_DELAY]
        return [write for replica in due for write in self.state.removals(replica)]

    def _describe(self) -> ReplicaInfo:
        digests = {feature.value: self._hub.catalog.items(feature).version.digest for feature in Feature}
        return ReplicaInfo(
            started=self._started,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("tidings"),
            digests=digests,
            applied=self.state.order,
            streams=len(self._hub),
        )

    def _write_all(self) -> None:
        """Write the items of this server again. What the table has already is left out."""
        with self._own.lock:
            writes = [
                item_write(self.id, feature, item.key, item)
                for feature in Feature
                for item in self._own.items(feature).snapshot()
            ]
            with self._lock:
                self._writes.update((write.key, write) for write in writes)
                for key in self.state.own_keys():
                    self._writes.setdefault(key, Write(key, None))
        self._has_work.set()

    # The watcher of the backend

    def load(self, epoch: str, entries: Sequence[Entry], order: int) -> None:
        self._set_reachable()
        is_new_table = epoch != self._hub.catalog.epoch
        self._hub.catalog.epoch = epoch
        with self._lock:
            pending = dict(self._writes)
            if is_new_table:  # a table that was lost is filled again
                found = {entry.key for entry in entries}
                for write in self.state.version_writes():
                    if write.key not in found:
                        self._writes.setdefault(write.key, write)
        self.state.load(entries, order, pending)
        self._durables.load(entries, is_new_table=is_new_table)
        self._stored.clear()
        self._is_joined = self.id in self.state.replicas
        self._after_apply(entries)
        self._write_all()

    def apply(self, entries: Sequence[Entry]) -> None:
        if self.lost_reason is not None:
            self._set_reachable()
            self._durables.resume()
            self._has_work.set()
        has_left = False
        for entry in entries:
            self.state.apply(entry)
            if entry.key.startswith(DURABLE):
                self._durables.apply(entry)
            has_left |= entry.key.startswith("replica/") and entry.value is None
            if entry.key == f"replica/{self.id}" and entry.value is None:
                self._is_joined = False  # expired: this process was paused, or could not write
                self._write_all()
        if has_left:
            self._durables.check_holders()
        self._check_own(entry.key for entry in entries if self._is_own(entry.key))
        self._after_apply(entries)

    def lose(self, reason: str) -> None:
        logger.warning("%s: continuing without the cluster: %s", self._server.name, reason)
        self.lost_reason = reason
        self._durables.lose()
        with self._own.lock, self._lock:
            coming = [self._own_write(key) for key in self._stored if key not in self._writes and self._is_coming(key)]
            pending = [*self._writes.values(), *coming]
        self._apply_locally(pending)

    def _set_reachable(self) -> None:
        if self.lost_reason is not None:
            logger.info("%s: connected to the cluster", self._server.name)
        self.lost_reason = None

    def _after_apply(self, entries: Sequence[Entry]) -> None:
        # A client may have fetched any version from another replica.
        fetched, catalog = self._hub.notifications.fetched, self._hub.catalog
        for feature in Feature:
            fetched.record(feature, Version(catalog.items(feature).version.revision, ""))
        for entry in entries:
            kind, _, uri = entry.key.partition("/")
            if kind == "content" and entry.value is not None:
                version = catalog.resources.content(uri)
                fetched.record(uri, Version(version.revision, ""))
                # `live.resources.updated(etag=…)` compares with the content that all replicas know.
                self._own.resources.put_content(uri, version.digest, is_silent=True)
        self._applied.set()
        self._applied = asyncio.Event()

    async def _handle_call(self, request: bytes, on_progress: OnProgress) -> bytes:
        return await handle(self._server, self._reader.lifespan, self._hub.counts, request, on_progress)

    async def catch_up(self, revision: int) -> None:
        """Wait until this replica has applied what a client has seen on another one, or a timeout is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_TIMEOUT):
                while self._hub.catalog.revision < revision and self.lost_reason is None:
                    await self._applied.wait()
