"""The background writer: one thread that writes the changes of a server's state to its store, in batches.

No caller waits for a disk: a change is only queued. While the disk is slow, full or removed, the queue takes no more
memory than the state itself, because it is compacted and drops what the journal drops. If a write fails, the writer
tries again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Mapping

from tidings.core.hub import Hub
from tidings.core.model import Change, Feature
from tidings.core.tracer import WRITE
from tidings.runtime.backoff import Backoff
from tidings.store import Batch, EventRow, JournalPart, Store, StoreBroken, StoreError
from tidings.store.durable_registry import DurableSubscriptions
from tidings.store.opened import OpenedStore

__all__ = ["StoreWriter"]

logger = logging.getLogger(__name__)

WRITE_DELAY = 0.05
"""Seconds from a change to its write. `kill -9` loses at most this much, and many changes are few transactions."""

RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 60.0
"""Seconds until a failed write is tried again."""

_MAX_QUEUED = 1024
"""Changes that are queued as they are. The thread that makes one more compacts them, in about a millisecond."""

_MAX_REMOVED_ITEMS = 10_000
"""Removed items that are queued. If there are more, the batch replaces all items instead."""

_RECHECK_INTERVAL = 2.0
"""Seconds between two checks of durable subscriptions that are not confirmed yet."""

_LOCK_PAUSE = 0.0005
"""Seconds for which the catalog's lock is free between two slices of durable subscriptions."""

_CLOSE_TIMEOUT = 2.0
"""Seconds that the end of the process waits for the last batch."""


class StoreWriter:
    """Writes the state of one server to its store. Without an open store, it does nothing."""

    def __init__(self, opened: OpenedStore, hub: Hub, durables: DurableSubscriptions) -> None:
        """Write every change from now on. `hub` and `durables` have the state of the store."""
        self.problem = opened.problem
        """Why changes are not saved; None if they are."""
        self._store: Store | None = None
        self._hub = hub
        self._catalog = hub.catalog
        self._journal = hub.journal
        self._durables = durables
        self._failures = hub.counts.failures
        self._lock = threading.Lock()
        self._queue: list[Change] = []
        self._events: dict[EventRow, bytes | None] = {}
        """Rows of events that are not in a batch yet."""
        self._compacted = Batch()
        """Changes that were queued before those in `_queue`."""
        self._batch = Batch()
        """The batch that is being written, or that could not be written."""
        self._floors: dict[JournalPart, int] = {}
        """The floors that were written last."""
        self._forgotten = 0
        self._has_work = threading.Event()
        self._closing = threading.Event()
        self._is_broken = False
        self._write_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if opened.state is None:
            if opened.is_failure:
                self._failures["store"] += 1
            return
        self._store = opened.store
        self._floors = dict(opened.state.floors)
        self._stop_following = self._catalog.follow(self.add_changes)
        durables.on_unsaved(self.wake)
        if durables.has_unsaved:
            self.wake()
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (found := close()) and found())

    # On any thread

    @property
    def is_open(self) -> bool:
        """Whether there is a store to write to."""
        return self._store is not None

    def add_changes(self, changes: tuple[Change, ...]) -> None:
        """Queue changes. The catalog calls this with its lock held, so it must be fast."""
        with self._lock:
            self._queue += changes
            if len(self._queue) > _MAX_QUEUED:
                self._compact()
        if not self._has_work.is_set():
            self.wake()

    def add_events(self, rows: Mapping[EventRow, bytes | None]) -> None:
        """Queue rows of events; None for a row to remove."""
        if self._store is None or self._is_broken:
            return
        with self._lock:
            self._events |= rows
        self.wake()

    def wake(self) -> bool:
        """Tell the writer that there is something to write. Return whether it will be written."""
        if self._store is None or self._is_broken:
            return False
        if self._closing.is_set():
            return True  # with the last batch
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tidings-store", daemon=True)
            self._thread.start()
        self._has_work.set()
        return True

    def flush(self, timeout: float = _CLOSE_TIMEOUT) -> bool:
        """Write everything now, and return whether that succeeded in time. Blocks: do not call it on an event loop."""
        store = self._store
        if store is None or not self._write_lock.acquire(timeout=timeout):
            return False
        try:
            return self._write(store)
        finally:
            self._write_lock.release()

    def close(self) -> None:
        """Write everything and close the store. A second call does nothing."""
        store = self._store
        if store is None:
            return
        self._stop_following()
        self._closing.set()
        self._has_work.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT)
        is_written = self.flush(_CLOSE_TIMEOUT)
        if self._thread is not None and self._thread.is_alive():
            return  # the disk hangs: the end of the process releases the store
        self._store = None
        try:
            store.close()
        except StoreError as error:
            logger.warning("%s", error)
        if not is_written:
            logger.warning("the last changes were not saved: %s", self.problem or "the disk is too slow")

    def _compact(self) -> None:
        """Reduce the queue to the size of the state. The caller holds the catalog's lock and the writer's."""
        changes, self._queue = self._queue, []
        self._compacted.add_changes(changes)
        self._compacted.forget(self._journal.floors(), self._catalog.resources.forgotten)
        count = sum(len(self._catalog.items(feature)) for feature in Feature)
        if len(self._compacted.items) > count + _MAX_REMOVED_ITEMS:
            self._compacted.replaces_items = True
            self._compacted.items = {
                (item.feature, item.key): item
                for feature in Feature
                for item in self._catalog.items(feature).snapshot()
            }

    # On the writer's thread

    def _run(self) -> None:
        backoff = Backoff(RETRY_DELAY, MAX_RETRY_DELAY)
        while not self._closing.is_set():
            self._has_work.wait(_RECHECK_INTERVAL if self._durables.has_unsaved else None)
            self._closing.wait(WRITE_DELAY)
            self._has_work.clear()
            if self.flush(timeout=MAX_RETRY_DELAY):
                backoff.reset()
            elif self._store is None or self._closing.wait(backoff.fail()):
                return
            else:
                self._has_work.set()

    def _write(self, store: Store) -> bool:
        """Write one batch; return whether that succeeded. The caller holds the lock for writing."""
        try:
            # Before the changes: a record must not have a version whose change is not in the batch.
            durables = self._durables.collect_unsaved(self._pause)
            with self._catalog.lock:
                self._journal.expire(self._catalog.now())
                floors, forgotten = self._journal.floors(), self._catalog.resources.forgotten
            with self._lock:
                compacted, changes = self._compacted, self._queue
                self._compacted, self._queue = Batch(), []
                events, self._events = self._events, {}
            batch = self._batch
            batch.merge(compacted)
            batch.add_changes(changes)
            batch.durables = dict(durables)
            batch.events |= events
            new_floors = {part: floor for part, floor in floors.items() if floor != self._floors.get(part, 0)}
            batch.forget(new_floors, forgotten if forgotten != self._forgotten else 0)
            if batch:
                with self._hub.tracer.span(WRITE, changes=len(batch.changes)):
                    store.write(batch)
                self._batch = Batch()
                self._durables.confirm_written()
                self._floors, self._forgotten = floors, forgotten
            if self.problem is not None:
                logger.info("changes are saved to %s again", store)
                self.problem = None
            return True
        except StoreError as error:
            self._fail(error)
            return False
        except Exception as error:  # an unexpected error of a store must not end the thread
            logger.exception("the store failed")
            self._fail(StoreError(f"{store} failed: {error!r}"))
            return False

    def _pause(self) -> None:
        # Releasing the lock is not enough: a thread that waits for it needs a moment to take it.
        self._closing.wait(_LOCK_PAUSE)

    def _fail(self, error: StoreError) -> None:
        self._failures["store"] += 1
        if isinstance(error, StoreBroken):
            self._is_broken = True
            self._closing.set()
        if self.problem != str(error):
            self.problem = str(error)
            logger.error("%s. Until that is fixed, changes are kept in memory only", error)
