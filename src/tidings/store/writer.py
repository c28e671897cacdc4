"""Between a server and its store: one thread that writes, in batches, what became of the state.

Whoever changes the catalog only leaves a note; nobody waits for a disk. A disk that is slow, full or gone for a while
costs no more memory than the state itself: what waits is folded, and what the journal forgets meanwhile is forgotten
here too. A store that can't be opened leaves the server with its memory alone; one that fails later is tried again.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from tidings.core.model import Change, Feature
from tidings.core.observer import WRITE, Tracer
from tidings.store import Batch, History, State, Store, StoreBroken, StoreBusy, StoreError
from tidings.store.durable import DurableSubscription, Key

if TYPE_CHECKING:
    from tidings.core.catalog import Catalog
    from tidings.core.journal import Journal

__all__ = ["StoreWriter", "create_writer"]

logger = logging.getLogger(__name__)

WRITE_DELAY = 0.05
"""Seconds from a change to its writing: what `kill -9` may cost is what happened in so long, and a storm is few
transactions."""

_FOLD = 1024
"""Changes that wait as they are. More of them are folded by whoever makes the next one, in about a millisecond."""

_MOST_ITEMS = 10_000
"""Items that wait over those that there are now: past it, all items are written anew."""

RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 60.0
"""Seconds until a store that failed is tried again, twice as long each time."""

_LOOK = 2.0
"""Seconds until those are asked again who had something that could not be written yet."""

_BREATH = 0.0005
"""Seconds between two slices of what is collected under the catalog's lock."""

_CLOSE_TIMEOUT = 2.0
"""Seconds that the end of the process may wait for the last batch."""


class Notes(Protocol):
    """Who else has something to write, asked just before a batch is made: the durable subscriptions."""

    def collect(self, pause: Callable[[], object]) -> Mapping[Key, DurableSubscription | None]:
        """All that was not `written` yet. `pause` lets others in, and is called often enough for nobody to notice."""

    def written(self) -> None:
        """What was collected last is written."""

    @property
    def has_records(self) -> bool:
        """Whether there is, or will be, something to collect."""


class StoreWriter:
    """Keeps one server's state in a store for as long as both are there."""

    def __init__(self, store: Store | None, *, is_explicit: bool = True) -> None:
        """`is_explicit` says that its user named the store, and wants to hear if it is not to be had."""
        self.store = store
        self.state: State | None = None
        """What the store knew at the start; None without one."""
        self.problem: str | None = None
        """Why nothing is being saved, if nothing is."""
        self._failures: Counter[str] = Counter()
        self._is_expected = is_explicit
        self._catalog: Catalog | None = None
        self._journal: Journal | None = None
        self._notes: Notes | None = None
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._folded = Batch()
        """What did not fit into `_changes`."""
        self._batch = Batch()
        """What is being written, or could not be."""
        self._floors: dict[History, int] = {}
        """Those that were written last."""
        self._forgotten = 0
        self.tracer = Tracer()
        self._roused = threading.Event()
        self._is_closing = threading.Event()
        self._is_broken = False
        self._is_idle = threading.Condition(self._lock)
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self._stop_following: Callable[[], None] | None = None
        if store is not None:
            self._open(store)

    def _open(self, store: Store) -> None:
        try:
            self.state = store.open()
        except StoreError as error:
            self.problem = str(error)
            if isinstance(error, StoreBusy) and not self._is_expected:
                logger.info("%s. This server keeps its state in memory only", error)
                return
            self._failures["store"] += 1
            log = logger.error if isinstance(error, StoreBroken) else logger.warning
            log("%s. Until this server is started anew, its state is in memory only", error)

    @property
    def is_saving(self) -> bool:
        return self.state is not None and self.problem is None

    def follow(self, catalog: Catalog, journal: Journal, notes: Notes, failures: Counter[str]) -> None:
        """Write down every commit from now on, and count failures where the server counts them."""
        failures.update(self._failures)
        self._failures = failures
        if self.state is None:
            return
        self._catalog, self._journal, self._notes = catalog, journal, notes
        self._floors = dict(self.state.floors)
        self.state = State(self.state.epoch, self.state.run)  # the rest is the catalog's now
        self._stop_following = catalog.follow(self.take)
        if notes.has_records:
            self.wake()
        close = weakref.WeakMethod(self.close)
        atexit.register(lambda: (found := close()) and found())

    # On any thread

    def take(self, changes: tuple[Change, ...]) -> None:
        """A sink of the catalog: called with its lock held, so it only leaves a note."""
        with self._lock:
            self._changes += changes
            if len(self._changes) > _FOLD:
                self._fold()
        if not self._roused.is_set():
            self.wake()

    def wake(self) -> bool:
        """There is something to write; whether anybody will."""
        if self.state is None or self._is_broken:
            return False
        if self._is_closing.is_set():
            return True  # with the last batch
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tidings-store", daemon=True)
            self._thread.start()
        self._roused.set()
        return True

    def flush(self, timeout: float = _CLOSE_TIMEOUT) -> bool:
        """Write what there is, now, and wait for it; whether it was written in time. Not for an event loop."""
        if self.state is None:
            return False
        deadline = time.monotonic() + timeout
        with self._is_idle:
            while self._is_writing:
                if not self._is_idle.wait(deadline - time.monotonic()):
                    return False
            self._is_writing = True
        return self._write()

    def close(self) -> None:
        """Write what is left, and let go of the store. Closing twice is fine."""
        if self.state is None:
            return
        if self._stop_following is not None:
            self._stop_following()
        self._is_closing.set()
        self._roused.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT)
        is_written = self.flush(_CLOSE_TIMEOUT)
        if self._thread is not None and self._thread.is_alive():
            return  # a disk that hangs: the kernel lets go of it in our place
        self.state = None
        try:
            if self.store is not None:
                self.store.close()
        except StoreError as error:
            logger.warning("%s", error)
        if not is_written:
            logger.warning("the last changes were not saved: %s", self.problem or "the disk is too slow")

    def _fold(self) -> None:
        """Make what waits as small as it can be. With both locks held, the catalog's and ours."""
        assert self._catalog is not None
        assert self._journal is not None
        changes, self._changes = self._changes, []
        self._folded.take(changes)
        self._folded.forget(self._journal.floors(), self._catalog.resources.forgotten)
        there = sum(len(self._catalog.items(feature)) for feature in Feature)
        if len(self._folded.items) > there + _MOST_ITEMS:
            self._folded.replaces_items = True
            self._folded.items = {
                (item.feature, item.key): item
                for feature in Feature
                for item in self._catalog.items(feature).snapshot()
            }

    # On the thread that writes

    def _run(self) -> None:
        wait = RETRY_DELAY
        while not self._is_closing.is_set():
            self._roused.wait(_LOOK if self._notes is not None and self._notes.has_records else None)
            self._is_closing.wait(WRITE_DELAY)
            self._roused.clear()
            if self.flush(timeout=MAX_RETRY_DELAY):
                wait = RETRY_DELAY
            elif self.state is None or self._is_closing.wait(wait):
                return
            else:
                wait = min(2 * wait, MAX_RETRY_DELAY)
                self._roused.set()

    def _write(self) -> bool:
        """One batch. With nobody else writing."""
        assert self._catalog is not None
        assert self._journal is not None
        assert self._notes is not None
        assert self.store is not None
        try:
            # First: whatever they say that somebody was told is then among the changes.
            durables = self._notes.collect(self._let_others_in)
            with self._catalog.lock:
                self._journal.expire(self._catalog.now())
                floors, forgotten = self._journal.floors(), self._catalog.resources.forgotten
            with self._lock:
                folded, changes = self._folded, self._changes
                self._folded, self._changes = Batch(), []
            batch = self._batch
            batch.add(folded)
            batch.take(changes)
            batch.durables = dict(durables)
            new_floors = {history: floor for history, floor in floors.items() if floor != self._floors.get(history, 0)}
            batch.forget(new_floors, forgotten if forgotten != self._forgotten else 0)
            if batch:
                with self.tracer.span(WRITE, changes=len(batch.changes)):
                    self.store.write(batch)
                self._batch = Batch()
                self._notes.written()
                self._floors, self._forgotten = floors, forgotten
            if self.problem is not None:
                logger.info("%s is being saved to again", self.store)
                self.problem = None
            return True
        except StoreError as error:
            self._fail(error)
            return False
        except Exception as error:  # whatever a store comes up with must not end the thread
            logger.exception("the store failed")
            self._fail(StoreError(f"{self.store} failed: {error!r}"))
            return False
        finally:
            with self._is_idle:
                self._is_writing = False
                self._is_idle.notify_all()

    def _let_others_in(self) -> None:
        # Not a bare release: whoever waits for the lock needs a moment to take it.
        self._is_closing.wait(_BREATH)

    def _fail(self, error: StoreError) -> None:
        self._failures["store"] += 1
        if isinstance(error, StoreBroken):
            self._is_broken = True
            self._is_closing.set()
        if self.problem != str(error):
            self.problem = str(error)
            logger.error("%s. What changes now is in memory only, until that is mended", error)


def create_writer(given: StoreWriter | Store | str | os.PathLike[str] | None) -> StoreWriter:
    """For a store, for the path of a file, or for none at all."""
    if isinstance(given, StoreWriter):
        return given
    if not isinstance(given, str | os.PathLike):
        return StoreWriter(given)
    from tidings.store.sqlite import SQLiteStore

    return StoreWriter(SQLiteStore(os.fspath(given)))
