"""The background writer: one thread that writes the changes of a server's state to its store, in batches.

No caller waits for a disk: a change is only queued. While the disk is slow, full or removed, the queue takes no more
memory than the state itself, because it is compacted and drops what the journal drops. If the store cannot be opened,
the server keeps its state in memory only. If a write fails later, the writer tries again.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidings.core.model import Change, Feature
from tidings.core.observer import WRITE, Tracer
from tidings.store import Batch, JournalPart, State, Store, StoreBroken, StoreBusy, StoreError
from tidings.store.unsaved import UnsavedSubscriptions

if TYPE_CHECKING:
    from tidings.core.catalog import Catalog
    from tidings.core.journal import Journal

__all__ = ["StoreWriter", "create_writer"]

logger = logging.getLogger(__name__)

WRITE_DELAY = 0.05
"""Seconds from a change to its write. `kill -9` loses at most this much, and many changes are few transactions."""

RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 60.0
"""Seconds until a failed write is tried again; the delay doubles each time."""

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
    """Writes the state of one server to its store."""

    def __init__(self, store: Store | None, *, is_explicit: bool = True) -> None:
        """`is_explicit` says that the user chose this store. If another server uses a default store, the
        writer logs no warning."""
        self.store = store
        self.state: State | None = None
        """The state of the store at the start; None without a store."""
        self.problem: str | None = None
        """Why changes are not saved; None if they are."""
        self.tracer = Tracer()
        self._is_explicit = is_explicit
        self._failures: Counter[str] = Counter()
        self._catalog: Catalog | None = None
        self._journal: Journal | None = None
        self._unsaved: UnsavedSubscriptions | None = None
        self._lock = threading.Lock()
        self._queue: list[Change] = []
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
        self._stop_following: Callable[[], None] | None = None
        if store is not None:
            self._open(store)

    def _open(self, store: Store) -> None:
        try:
            self.state = store.open()
        except StoreError as error:
            self.problem = str(error)
            if isinstance(error, StoreBusy) and not self._is_explicit:
                logger.info("%s. This server keeps its state in memory only", error)
                return
            self._failures["store"] += 1
            log = logger.error if isinstance(error, StoreBroken) else logger.warning
            log("%s. This server keeps its state in memory only, until it is restarted", error)

    def follow(self, catalog: Catalog, journal: Journal, unsaved: UnsavedSubscriptions, failures: Counter[str]) -> None:
        """Write every change from now on. Count failures in `failures`."""
        failures.update(self._failures)
        self._failures = failures
        if self.state is None:
            return
        self._catalog, self._journal, self._unsaved = catalog, journal, unsaved
        self._floors = dict(self.state.floors)
        self.state = State(self.state.epoch, self.state.run)  # the catalog has the rest now
        self._stop_following = catalog.follow(self.add_changes)
        if unsaved.has_records:
            self.wake()
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (found := close()) and found())

    # On any thread

    def add_changes(self, changes: tuple[Change, ...]) -> None:
        """Queue changes. The catalog calls this with its lock held, so it must be fast."""
        with self._lock:
            self._queue += changes
            if len(self._queue) > _MAX_QUEUED:
                self._compact()
        if not self._has_work.is_set():
            self.wake()

    def wake(self) -> bool:
        """Tell the writer that there is something to write. Return whether it will be written."""
        if self.state is None or self._is_broken:
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
        if self.state is None or not self._write_lock.acquire(timeout=timeout):
            return False
        try:
            return self._write()
        finally:
            self._write_lock.release()

    def close(self) -> None:
        """Write everything and close the store. A second call does nothing."""
        if self.state is None:
            return
        if self._stop_following is not None:
            self._stop_following()
        self._closing.set()
        self._has_work.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT)
        is_written = self.flush(_CLOSE_TIMEOUT)
        if self._thread is not None and self._thread.is_alive():
            return  # the disk hangs: the end of the process releases the store
        self.state = None
        try:
            if self.store is not None:
                self.store.close()
        except StoreError as error:
            logger.warning("%s", error)
        if not is_written:
            logger.warning("the last changes were not saved: %s", self.problem or "the disk is too slow")

    def _compact(self) -> None:
        """Reduce the queue to the size of the state. The caller holds the catalog's lock and the writer's."""
        assert self._catalog is not None
        assert self._journal is not None
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
        delay = RETRY_DELAY
        while not self._closing.is_set():
            self._has_work.wait(_RECHECK_INTERVAL if self._unsaved is not None and self._unsaved.has_records else None)
            self._closing.wait(WRITE_DELAY)
            self._has_work.clear()
            if self.flush(timeout=MAX_RETRY_DELAY):
                delay = RETRY_DELAY
            elif self.state is None or self._closing.wait(delay):
                return
            else:
                delay = min(2 * delay, MAX_RETRY_DELAY)
                self._has_work.set()

    def _write(self) -> bool:
        """Write one batch; return whether that succeeded. The caller holds the lock for writing."""
        assert self._catalog is not None
        assert self._journal is not None
        assert self._unsaved is not None
        assert self.store is not None
        try:
            # Before the changes: a record must not have a version whose change is not in the batch.
            durables = self._unsaved.collect(self._pause)
            with self._catalog.lock:
                self._journal.expire(self._catalog.now())
                floors, forgotten = self._journal.floors(), self._catalog.resources.forgotten
            with self._lock:
                compacted, changes = self._compacted, self._queue
                self._compacted, self._queue = Batch(), []
            batch = self._batch
            batch.merge(compacted)
            batch.add_changes(changes)
            batch.durables = dict(durables)
            new_floors = {part: floor for part, floor in floors.items() if floor != self._floors.get(part, 0)}
            batch.forget(new_floors, forgotten if forgotten != self._forgotten else 0)
            if batch:
                with self.tracer.span(WRITE, changes=len(batch.changes)):
                    self.store.write(batch)
                self._batch = Batch()
                self._unsaved.written()
                self._floors, self._forgotten = floors, forgotten
            if self.problem is not None:
                logger.info("changes are saved to %s again", self.store)
                self.problem = None
            return True
        except StoreError as error:
            self._fail(error)
            return False
        except Exception as error:  # an unexpected error of a store must not end the thread
            logger.exception("the store failed")
            self._fail(StoreError(f"{self.store} failed: {error!r}"))
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


def create_writer(store: StoreWriter | Store | str | os.PathLike[str] | None) -> StoreWriter:
    """Return a writer for a store, for the path of a state file, or for no store at all."""
    if isinstance(store, StoreWriter):
        return store
    if not isinstance(store, str | os.PathLike):
        return StoreWriter(store)
    from tidings.store.sqlite import SQLiteStore

    return StoreWriter(SQLiteStore(os.fspath(store)))
