"""The backend for replicas in one process: a table in memory. Nothing is stored, and no network is used.

The replicas may run on the event loops of several threads. Tests use it to disconnect a replica, or to empty the table.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from tidings.cluster.backend import (
    CallFailed,
    CallHandler,
    Entry,
    NotDelivered,
    OnProgress,
    TooLarge,
    Unavailable,
    Watcher,
    Write,
)

__all__ = ["MemoryBackend", "MemoryTable"]


class MemoryTable:
    """A table that several `MemoryBackend` objects share. It belongs to one server; use another for another server."""

    def __init__(self, max_size: int = 1024 * 1024) -> None:
        self.max_size = max_size
        """The largest value in bytes. The default is about that of NATS."""
        self._lock = threading.RLock()
        self._epoch = uuid.uuid4().hex
        self._order = time.time_ns() // 1_000_000
        self._entries: dict[str, Entry] = {}
        self._expiry: dict[str, float] = {}
        self._connected: dict[str, _Connection] = {}
        """By replica."""

    def backend(self) -> MemoryBackend:
        """Return a backend for one more replica."""
        return MemoryBackend(self)

    def clear(self) -> None:
        """Empty the table, as if it were lost and created again: it gets a new epoch, and all watchers load it."""
        with self._lock:
            self._epoch = uuid.uuid4().hex
            self._order += 1
            self._entries.clear()
            self._expiry.clear()
            for connection in self._connected.values():
                self._load(connection)

    def _connect(self, replica: str, connection: _Connection) -> None:
        with self._lock:
            self._expire()
            self._connected[replica] = connection
            self._load(connection)

    def _disconnect(self, replica: str, connection: _Connection) -> None:
        with self._lock:
            if self._connected.get(replica) is connection:
                del self._connected[replica]

    def _find(self, replica: str) -> _Connection | None:
        with self._lock:
            return self._connected.get(replica)

    def _load(self, connection: _Connection) -> None:
        entries = sorted(self._entries.values(), key=lambda entry: entry.order)
        connection.deliver(_Snapshot(self._epoch, entries, self._order))

    def _write(self, writes: Sequence[Write]) -> list[int | None]:
        orders: list[int | None] = []
        with self._lock:
            self._expire()
            for key, value, ttl, expected in writes:
                present = self._entries.get(key)
                if expected is not None and (present is None or present.order != expected):
                    orders.append(None)
                    continue
                self._order += 1
                orders.append(self._order)
                entry = Entry(key, value, self._order)
                self._entries.pop(key, None)
                self._expiry.pop(key, None)
                if value is not None:
                    self._entries[key] = entry
                    if ttl is not None:
                        self._expiry[key] = time.monotonic() + ttl
                for connection in self._connected.values():
                    connection.deliver(entry)
        return orders

    def _expire(self) -> float | None:
        """Delete the expired keys. Return the seconds until the next one expires."""
        with self._lock:
            now = time.monotonic()
            expired = [key for key, at in self._expiry.items() if at <= now]
            if expired:
                for key in expired:
                    del self._expiry[key]
                self._write([Write(key, None) for key in expired])
            return max(min(self._expiry.values()) - now, 0.001) if self._expiry else None


class _Snapshot(NamedTuple):
    epoch: str
    entries: list[Entry]
    order: int


class _Connection:
    """A running backend: its event loop, and the events that its watcher has not received yet."""

    def __init__(self, watcher: Watcher, handler: CallHandler) -> None:
        self.watcher = watcher
        self.handler = handler
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self.calls: set[asyncio.Task[bytes]] = set()
        self._queue: list[Entry | _Snapshot | str] = []

    def deliver(self, event: Entry | _Snapshot | str) -> None:
        """Queue an entry, a snapshot or the reason of a disconnect. The caller holds the lock of the table."""
        self._queue.append(event)
        if len(self._queue) == 1:
            self.loop.call_soon_threadsafe(self.wake.set)

    def take(self) -> list[Entry | _Snapshot | str]:
        """Return the queue and empty it. The caller holds the lock of the table."""
        self.wake.clear()
        queue, self._queue = self._queue, []
        return queue

    def flush(self, queue: list[Entry | _Snapshot | str]) -> None:
        entries: list[Entry] = []
        for event in [*queue, None]:
            if isinstance(event, Entry):
                entries.append(event)
                continue
            if entries:
                self.watcher.apply(entries)
                entries = []
            if isinstance(event, _Snapshot):
                self.watcher.load(*event)
            elif event is not None:
                self.watcher.lose(event)

    def cancel_calls(self) -> None:
        for call in self.calls:
            call.cancel()


class MemoryBackend:
    """Share a table with the other `MemoryBackend` objects of the same `MemoryTable`."""

    def __init__(self, table: MemoryTable | None = None) -> None:
        self.table = MemoryTable() if table is None else table
        self._replica = ""
        self._connection: _Connection | None = None
        self._reachable = True
        self._calling: set[asyncio.Future[bytes]] = set()

    async def run(self, name: str, replica: str, watcher: Watcher, handler: CallHandler) -> None:
        self._replica = replica
        connection = self._connection = _Connection(watcher, handler)
        if self._reachable:
            self.table._connect(replica, connection)
        else:
            with self.table._lock:
                connection.deliver("the backend is disconnected")
        try:
            while True:
                with self.table._lock:
                    timeout = self.table._expire()
                    queue = connection.take()
                connection.flush(queue)
                try:
                    async with asyncio.timeout(timeout):
                        await connection.wake.wait()
                except TimeoutError:
                    pass
        finally:
            self.table._disconnect(replica, connection)
            self._connection = None
            connection.cancel_calls()
            await asyncio.gather(*connection.calls, return_exceptions=True)

    async def write(self, writes: Sequence[Write]) -> list[int | None]:
        if self._connection is None or not self._reachable:
            raise Unavailable("the backend in memory is disconnected")
        for key, value, *_ in writes:
            if value is not None and len(value) > self.table.max_size:
                raise TooLarge(f"{key} has {len(value):,} bytes, more than the {self.table.max_size:,} of the table")
        await asyncio.sleep(0)  # let other tasks run, as the other backends do
        return self.table._write(writes)

    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109 – as in the protocol
        target = self.table._find(replica)
        if self._connection is None or not self._reachable or target is None:
            raise NotDelivered(f"the replica {replica} cannot be reached")
        loop = asyncio.get_running_loop()

        def forward(progress: bytes) -> None:
            loop.call_soon_threadsafe(lambda: None if reply.done() else on_progress(progress))

        async def handle() -> bytes:
            task = asyncio.ensure_future(target.handler(request, forward))
            target.calls.add(task)
            try:
                return await task
            finally:
                target.calls.discard(task)

        reply = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(handle(), target.loop))
        self._calling.add(reply)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait([reply])
        except TimeoutError:
            raise CallFailed(f"the replica {replica} did not reply within {timeout:g} s") from None
        finally:
            self._calling.discard(reply)
            reply.cancel()
        if reply.cancelled():
            raise CallFailed(f"the replica {replica} has left, or was disconnected, during the call")
        error = reply.exception()
        if error is not None:
            raise CallFailed(f"the replica {replica} failed: {error}") from error
        return reply.result()

    def disconnect(self, reason: str = "disconnected by a test") -> None:
        """Make the table unreachable for this replica. Call this, and `reconnect`, on the event loop of `run`."""
        self._reachable = False
        for reply in self._calling:
            reply.cancel()
        connection = self._connection
        if connection is not None:
            self.table._disconnect(self._replica, connection)
            with self.table._lock:
                connection.deliver(reason)
            connection.cancel_calls()

    def reconnect(self) -> None:
        """Make the table reachable again; the watcher loads it."""
        self._reachable = True
        if self._connection is not None:
            self.table._connect(self._replica, self._connection)
