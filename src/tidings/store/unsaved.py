"""The durable subscriptions that the store has not written yet.

The registry and its connections mark what changed. The store's writer collects the records, writes them, and confirms
that with `written`. A record that changes while it is being written is collected again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from tidings.store.durable import DurableSubscription, Key

__all__ = ["UnconfirmedConnection", "UnsavedSubscriptions"]

_SLICE = 20_000
"""Topics of subscriptions that are collected without releasing the lock: about a millisecond."""

Refresh: TypeAlias = Callable[[Key], tuple[DurableSubscription | None, bool]]
"""Brings one record up to date; returns it, and whether its client has confirmed all that it was told."""


class UnconfirmedConnection(Protocol):
    """A connection whose client was told something that it may not have received."""

    @property
    def key(self) -> Key: ...

    @property
    def confirmed_at(self) -> float:
        """When the versions that the client was told count as received, if the connection stays open until then."""


class UnsavedSubscriptions:
    """The durable subscriptions of one server that are to be written. Callers of `mark`, `expect`, `recheck`, `confirm`
    and `remove` hold the lock."""

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        now: Callable[[], float],
        wake: Callable[[], bool] | None,
        records: Mapping[Key, DurableSubscription],
        *,
        refresh: Refresh,
        expire: Callable[[], None],
        saved: Iterable[Key],
        changed: Iterable[Key],
    ) -> None:
        """`wake` tells the writer that there is something to collect; it returns whether the writer will. `saved` are
        the keys that the store has; the records of those in `changed` differ from the stored ones."""
        self._lock = lock
        self._now = now
        self._wake = wake
        self._records = records
        self._refresh = refresh
        self._expire = expire
        self._saved = set(saved)
        self._marked = dict.fromkeys(changed, True)
        """The records to collect: always, or (False) only if the record has changed by then."""
        self._unconfirmed: dict[Key, UnconfirmedConnection] = {}
        """Their records are not written before they are confirmed: after a crash, everything that changed since the
        last write would be unconfirmed in any case."""
        self._next_check = 0.0
        self._collected: dict[Key, DurableSubscription | None] = {}
        """The records that were collected since the last confirmed write."""
        self._writing: dict[Key, DurableSubscription | None] = {}

    def mark(self, key: Key) -> None:
        """Write this record with the next batch."""
        if self._wake is not None and self._wake():
            self._marked[key] = True

    def expect(self, connection: UnconfirmedConnection) -> None:
        """Write the record of this connection once it is confirmed. Wakes the writer for the first one only."""
        if self._unconfirmed or (self._wake is not None and self._wake()):
            self._unconfirmed[connection.key] = connection
            self._next_check = min(self._next_check, connection.confirmed_at)

    def recheck(self, key: Key) -> None:
        """Collect this record if it has changed: part of what its client was told may be confirmed."""
        if key in self._unconfirmed:
            self._marked.setdefault(key, False)

    def confirm(self, key: Key) -> None:
        """Wait no longer for a confirmation of this record."""
        self._unconfirmed.pop(key, None)

    def remove(self, key: Key) -> None:
        """Write the removal of a record, unless the store never had it: names that are created and removed while the
        store is unavailable must not fill the memory."""
        if key in self._saved:
            self.mark(key)
        else:
            self._marked.pop(key, None)
            self._collected.pop(key, None)

    # For the writer, on its own thread

    @property
    def has_records(self) -> bool:
        """Whether there is, or will be, something to collect."""
        return bool(self._marked or self._unconfirmed)

    def collect(self, pause: Callable[[], object] | None = None) -> Mapping[Key, DurableSubscription | None]:
        """Return the records that changed since the last confirmed write; None for those that were removed.

        Never holds the lock for long: `pause` is called in between, for threads that wait for it.
        """
        with self._lock:
            self._expire()
            if self._next_check <= (now := self._now()):
                due = [key for key, connection in self._unconfirmed.items() if connection.confirmed_at <= now]
                self._marked = dict.fromkeys(due, False) | self._marked
                times = (connection.confirmed_at for connection in self._unconfirmed.values())
                self._next_check = min(times, default=math.inf)
            marked = iter(list(self._marked))
        while self._collect_slice(marked):
            if pause is not None:
                pause()
        with self._lock:
            self._writing = dict(self._collected)
        return self._writing

    def written(self) -> None:
        """Confirm that the records of the last `collect` were written."""
        written, self._writing = self._writing, {}
        with self._lock:
            for key, record in written.items():
                if self._collected.get(key, ...) is record:
                    del self._collected[key]
                (self._saved.discard if record is None else self._saved.add)(key)
                if record is not None and key not in self._records:  # removed while it was being written
                    self.mark(key)

    def _collect_slice(self, marked: Iterator[Key]) -> bool:
        """Collect some of the marked records; return whether there may be more."""
        left = _SLICE
        with self._lock:
            for key in marked:
                if key not in self._marked:
                    continue  # created and removed in the meantime
                before = self._records.get(key)
                record, is_confirmed = self._refresh(key)
                if self._marked[key] or record != before:
                    self._collected[key] = record
                self._marked[key] = False
                if is_confirmed or key in self._unconfirmed:
                    del self._marked[key]
                left -= 64 + (len(record.uris) + len(record.contents) if record is not None else 0)
                if left <= 0:
                    return True
        return False
