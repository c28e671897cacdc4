"""Replicas on a backend: a watcher that keeps the table, a handler of calls, and waiting for the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.support.waiting import until
from tidings.cluster.backend import Backend, Entry, OnProgress, Write

__all__ = ["Replica", "replica"]


class Replica:
    """A watcher with all that it was given, and a handler that does what the request says."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.table: dict[str, bytes] = {}
        self.applied: list[Entry] = []
        """The writes after the last snapshot."""
        self.seen: list[int] = []
        """The order of each write, and of each snapshot."""
        self.epochs: list[str] = []
        self.lost: list[str] = []
        self.is_connected = False
        self.cancelled = 0

    def load(self, epoch: str, entries: Sequence[Entry], order: int) -> None:
        assert all(entry.value is not None and entry.order <= order for entry in entries)
        self.table = {entry.key: entry.value for entry in entries if entry.value is not None}
        self.epochs.append(epoch)
        self.applied = []
        self.seen.append(order)
        self.is_connected = True

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.applied.append(entry)
            self.seen.append(entry.order)
            if entry.value is None:
                self.table.pop(entry.key, None)
            else:
                self.table[entry.key] = entry.value
        self.is_connected = True

    def lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.is_connected = False

    async def handle(self, request: bytes, on_progress: OnProgress) -> bytes:
        if request == b"fail":
            raise ValueError("the file is missing")
        for step in range(3):
            on_progress(b"step %d" % step)
        if request == b"wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return self.name.encode() + b" got " + request

    async def write(self, *writes: tuple[str, bytes | None] | Write) -> list[int | None]:
        return await self.backend.write([write if isinstance(write, Write) else Write(*write) for write in writes])

    async def until(self, table: dict[str, bytes]) -> None:
        """Wait until the watcher has exactly this table."""
        try:
            await until(lambda: self.table == table)
        except TimeoutError:
            raise AssertionError(f"{self.name} has {self.table}, not {table}") from None


@asynccontextmanager
async def replica(backend: Backend, server: str, name: str) -> AsyncIterator[Replica]:
    """Run a backend for one replica. It is connected at the start, and leaves at the end."""
    one = Replica(backend, name)
    running = asyncio.create_task(backend.run(server, name, one, one.handle))
    try:
        await until(lambda: one.is_connected or running.done())
        assert not running.done(), running
        yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled(), running.exception()
