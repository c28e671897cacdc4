"""Read the state of a cluster from its table, without joining the cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tidings.cluster.backend import Backend, Entry, NotDelivered, OnProgress, Unavailable
from tidings.cluster.shared_state import ReplicaInfo

__all__ = ["ClusterStatus", "ReplicaStatus", "read_status"]


class ReplicaStatus(msgspec.Struct):
    id: str
    host: str
    pid: int
    started: str
    version: str
    streams: int
    items: int
    """The items that it serves itself."""
    lag: int
    """The writes that it had not applied when it last reported."""
    digests: dict[str, str]


class ClusterStatus(msgspec.Struct):
    name: str
    replicas: list[ReplicaStatus]

    @property
    def is_consistent(self) -> bool:
        """Whether all replicas have the same lists."""
        return len({tuple(sorted(replica.digests.items())) for replica in self.replicas}) <= 1


class _Reader:
    """A watcher that keeps the replicas and items of the table."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[ReplicaInfo, int]] = {}
        """The description of each replica, with the order of its entry."""
        self.items: dict[str, str] = {}
        """The replica of each item."""
        self.changed = asyncio.Event()
        self.reason = "NATS did not answer; is it running?"
        """Why the table could not be read yet."""

    def load(self, epoch: str, entries: Sequence[Entry], order: int) -> None:
        self.replicas.clear()
        self.items.clear()
        self.apply(entries)

    def apply(self, entries: Sequence[Entry]) -> None:
        for key, value, order in entries:
            kind, _, name = key.partition("/")
            if kind == "item":
                self.items.pop(key, None)
                if value is not None:
                    self.items[key] = name.partition("/")[0]
            elif kind == "replica":
                self.replicas.pop(name, None)
                if value is not None:
                    with suppress(msgspec.DecodeError):
                        self.replicas[name] = (msgspec.json.decode(value, type=ReplicaInfo), order)
        self.changed.set()

    def lose(self, reason: str) -> None:
        self.reason = reason

    def status(self, name: str) -> ClusterStatus:
        items = Counter(self.items.values())
        return ClusterStatus(
            name,
            [
                ReplicaStatus(
                    id=replica,
                    host=info.host,
                    pid=info.pid,
                    started=info.started,
                    version=info.version,
                    streams=info.streams,
                    items=items[replica],
                    lag=max(0, order - 1 - info.applied),
                    digests=info.digests,
                )
                for replica, (info, order) in sorted(self.replicas.items())
            ],
        )


async def read_status(backend: Backend, name: str, max_wait: float) -> ClusterStatus:
    """Return the state of the cluster of one server.

    Replicas report about once per second. If their reports differ, wait for `max_wait` seconds until they agree. Raise
    `Unavailable` if the table was not read by then."""

    async def refuse(request: bytes, on_progress: OnProgress) -> bytes:
        raise NotDelivered("this is not a replica")

    reader = _Reader()
    reading = asyncio.create_task(backend.run(name, "status", reader, refuse))
    try:
        try:
            async with asyncio.timeout(max_wait):
                await reader.changed.wait()
        except TimeoutError:
            raise Unavailable(f"the replicas of {name} were not read within {max_wait:g} s: {reader.reason}") from None
        with suppress(TimeoutError):
            async with asyncio.timeout(max_wait):
                while not reader.status(name).is_consistent:
                    reader.changed.clear()
                    await reader.changed.wait()
        return reader.status(name)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
