"""The durable subscriptions that the store has not written yet.

The registry and its connections mark what changed. The store's writer collects the records, writes them, and confirms
that with `written`. A record that changes while it is being written is collected again. While its client is connected,
a record is written once the versions that the client was told count as received, and not with each notification: after
a crash, everything that changed since the last write would count as unconfirmed in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from tidings.store.durable import DurableSubscription, Key

__all__ = ["UnsavedSubscriptions"]

_SLICE = 20_000
"""Topics of subscriptions that are collected without releasing the lock: about a millisecond."""

Refresh: TypeAlias = Callable[[Key], tuple[DurableSubscription | None, float | None]]
"""Brings one record up to date; returns it, and when it is to be written again, if its client was told something that
is not confirmed yet."""


class UnsavedSubscriptions:
    """The durable subscriptions of one server that are to be written. Callers of `mark` and `remove` hold the lock."""

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        now: Callable[[], float],
        wake: Callable[[], bool] | None,
        records: Mapping[Key, DurableSubscription],
        *,
        refresh: Refresh,
        expire: Callable[[], None],
        stored: Collection[DurableSubscription],
    ) -> None:
        """`wake` tells the writer that there is something to collect; it returns whether the writer will. `stored` are
        the records that the store has. Those without a time of expiry may get one, so they are written."""
        self._lock = lock
        self._now = now
        self._wake = wake
        self._records = records
        self._refresh = refresh
        self._expire = expire
        self._saved = {record.key for record in stored}
        self._due = {record.key: 0.0 for record in stored if record.expires is None}
        """The records to collect, and when."""
        self._collected: dict[Key, DurableSubscription | None] = {}
        """The records that were collected since the last confirmed write."""
        self._writing: dict[Key, DurableSubscription | None] = {}

    def mark(self, key: Key, at: float = 0.0) -> None:
        """Write this record with the next batch, or with the first one after a time."""
        if self._wake is not None and self._wake():
            self._due[key] = min(at, self._due.get(key, at))

    def remove(self, key: Key) -> None:
        """Write the removal of a record, unless the store never had it: names that are created and removed while the
        store is unavailable must not fill the memory."""
        if key in self._saved:
            self.mark(key)
        else:
            self._due.pop(key, None)
            self._collected.pop(key, None)

    # For the writer, on its own thread

    @property
    def has_records(self) -> bool:
        """Whether there is, or will be, something to collect."""
        return bool(self._due)

    def collect(self, pause: Callable[[], object] | None = None) -> Mapping[Key, DurableSubscription | None]:
        """Return the records that changed since the last confirmed write; None for those that were removed.

        Never holds the lock for long: `pause` is called in between, for threads that wait for it.
        """
        with self._lock:
            self._expire()
            now = self._now()
            due = iter([key for key, at in self._due.items() if at <= now])
        while self._collect_slice(due):
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

    def _collect_slice(self, due: Iterator[Key]) -> bool:
        """Collect some of the due records; return whether there may be more."""
        left = _SLICE
        with self._lock:
            for key in due:
                if self._due.pop(key, None) is None:
                    continue  # created and removed in the meantime
                record, confirmed_at = self._refresh(key)
                self._collected[key] = record
                if confirmed_at is not None:
                    self._due[key] = confirmed_at
                left -= 64 + (len(record.uris) + len(record.contents) if record is not None else 0)
                if left <= 0:
                    return True
        return False
