"""The events that the server's own code emits: the queue of each subscription, and the history.

Each of these events is delivered, unlike the changes of a topic, which are merged. An event stays in a queue until the
subscription has it, or it is too old. The length of a queue and the bytes of all events are bounded: the oldest events
are dropped. An event that is in no queue moves to the history, which keeps the newest. Both are in memory and in the
store.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import msgspec

from tidings.core.counts import Counts
from tidings.store import EventRow

__all__ = ["MAX_AGE", "MAX_QUEUED", "Occurrence", "Occurrences", "read_history"]

logger = logging.getLogger(__name__)

MAX_AGE = 3 * 24 * 3600.0
"""Seconds that an undelivered event is kept: a receiver may be down for a weekend."""
MAX_QUEUED = 1_000
"""Undelivered events of one subscription."""
MAX_BYTES = 64 << 20
"""Bytes of all undelivered events. An event counts once, even if several subscriptions wait for it."""

_HISTORY, _HISTORY_BYTES = 1_000, 4 << 20
"""Events in the history, and their bytes."""

Save: TypeAlias = Callable[[Mapping[EventRow, bytes | None]], object]
"""Writes rows to the store. None removes a row."""


class Occurrence(msgspec.Struct, frozen=True, array_like=True):
    """One event that the server's own code emitted."""

    id: str
    name: str
    time: float
    body: bytes
    """The body of the request, the same for every subscription."""


_decode = msgspec.msgpack.Decoder(Occurrence).decode


class Occurrences:
    """The emitted events of one server. All methods may be called from any thread."""

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        now: Callable[[], float],
        counts: Counts,
        save: Save,
        stored: Mapping[EventRow, bytes],
    ) -> None:
        """`stored` are the rows of the store at the start."""
        self._lock = lock
        self._now = now
        self._counts = counts.events
        self._save = save
        self._events: dict[str, Occurrence] = {}
        self._waiting: dict[str, set[str]] = {}
        """For each event, the subscriptions that wait for it."""
        self._queues: dict[str, dict[str, None]] = {}
        """For each subscription, the ids of the events that it waits for, the oldest first."""
        self._bytes = 0
        self._history: dict[str, Occurrence] = {}
        """The events that no subscription waits for, the oldest first."""
        self._history_bytes = 0
        for (event_id, subscription), row in stored.items():
            if not subscription:
                self._insert(_decode(row), ())
            elif event_id in self._events:
                self._waiting[event_id].add(subscription)
                self._queues.setdefault(subscription, {})[event_id] = None
        for event_id in [event_id for event_id, waiting in self._waiting.items() if not waiting]:
            self._move_to_history(event_id)

    def __len__(self) -> int:
        return len(self._events)

    def count(self, subscription: str) -> int:
        """Return how many events a subscription waits for."""
        return len(self._queues.get(subscription, ()))

    def subscriptions(self) -> list[str]:
        """Return the subscriptions that wait for an event."""
        with self._lock:
            return list(self._queues)

    def history(self) -> list[dict[str, Any]]:
        """Return the waiting events and those of the history, the oldest first."""
        with self._lock:
            events = sorted([*self._history.values(), *self._events.values()], key=lambda event: event.time)
            return [_as_json(event, len(self._waiting.get(event.id, ()))) for event in events]

    def add(self, event: Occurrence, subscriptions: Collection[str]) -> None:
        """Add an event to the queues of its subscriptions. Ignore it if an event with this id is known."""
        with self._lock:
            if event.id in self._events or event.id in self._history:
                return
            self._insert(event, subscriptions)
            rows: dict[EventRow, bytes | None] = {(event.id, ""): msgspec.msgpack.encode(event)}
            rows |= {(event.id, each): b"" for each in subscriptions}
            self._save(rows)
            if not subscriptions:
                self._save(self._move_to_history(event.id))
            for each in subscriptions:
                if len(self._queues[each]) > MAX_QUEUED:
                    self._drop(each, next(iter(self._queues[each])), f"more than {MAX_QUEUED} events wait")
            while self._bytes > MAX_BYTES and len(self._events) > 1:
                oldest = next(iter(self._events))
                for each in list(self._waiting[oldest]):
                    self._drop(each, oldest, f"more than {MAX_BYTES} bytes of events wait")

    def next(self, subscription: str) -> Occurrence | None:
        """Return the oldest event that a subscription waits for. Drop those that are too old."""
        with self._lock:
            for event_id in list(self._queues.get(subscription, ())):
                event = self._events[event_id]
                if self._now() - event.time <= MAX_AGE:
                    return event
                self._drop(subscription, event_id, "it is too old")
            return None

    def remove(self, subscription: str, event_id: str) -> None:
        """Remove an event from the queue of a subscription."""
        with self._lock:
            queue = self._queues.get(subscription)
            if queue is None or event_id not in queue:
                return
            del queue[event_id]
            if not queue:
                del self._queues[subscription]
            rows: dict[EventRow, bytes | None] = {(event_id, subscription): None}
            waiting = self._waiting[event_id]
            waiting.discard(subscription)
            if not waiting:
                rows |= self._move_to_history(event_id)
            self._save(rows)

    def remove_all(self, subscription: str) -> None:
        """Remove all events of a subscription that has ended."""
        with self._lock:
            for event_id in list(self._queues.get(subscription, ())):
                self.remove(subscription, event_id)

    def _move_to_history(self, event_id: str) -> dict[EventRow, bytes | None]:
        """Move an event that no subscription waits for to the history. Return the rows that the history drops."""
        event = self._history[event_id] = self._events.pop(event_id)
        del self._waiting[event_id]
        self._bytes -= len(event.body)
        self._history_bytes += len(event.body)
        rows: dict[EventRow, bytes | None] = {}
        while len(self._history) > _HISTORY or self._history_bytes > _HISTORY_BYTES:
            oldest = next(iter(self._history))
            self._history_bytes -= len(self._history.pop(oldest).body)
            rows[oldest, ""] = None
        return rows

    def _insert(self, event: Occurrence, subscriptions: Collection[str]) -> None:
        self._events[event.id] = event
        self._waiting[event.id] = set(subscriptions)
        self._bytes += len(event.body)
        for each in subscriptions:
            self._queues.setdefault(each, {})[event.id] = None

    def _drop(self, subscription: str, event_id: str, reason: str) -> None:
        logger.warning("the event %s is not delivered to %s: %s", event_id, subscription, reason)
        self._counts["dropped"] += 1
        self.remove(subscription, event_id)


def read_history(stored: Mapping[EventRow, bytes]) -> Iterable[dict[str, Any]]:
    """Return the events in a store, the oldest first."""
    waiting = Counter(event_id for event_id, subscription in stored if subscription)
    events = [_decode(row) for (_, subscription), row in stored.items() if not subscription]
    return [_as_json(event, waiting[event.id]) for event in sorted(events, key=lambda event: event.time)]


def _as_json(event: Occurrence, waiting: int) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(event.body)
    return {**body, "waiting": waiting}
