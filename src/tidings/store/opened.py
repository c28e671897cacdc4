"""A store that a server has tried to open. If that fails, the server keeps its state in memory only."""

from __future__ import annotations

import logging
import os

from tidings.store import State, Store, StoreBroken, StoreBusy, StoreError

__all__ = ["OpenedStore", "open_store"]

logger = logging.getLogger(__name__)


class OpenedStore:
    """A store with the state that it had when it was opened, or with the reason why it could not be opened."""

    def __init__(self, store: Store | None, *, is_explicit: bool = True) -> None:
        """`is_explicit` says that the user chose this store. If another server uses a default store, that is no failure
        and needs no warning."""
        self.store = store
        self.state: State | None = None
        """None without a store, and if it can't be opened."""
        self.problem: str | None = None
        """Why it can't be opened."""
        self.is_failure = False
        try:
            if store is not None:
                self.state = store.open()
        except StoreError as error:
            self.problem = str(error)
            if isinstance(error, StoreBusy) and not is_explicit:
                logger.info("%s. This server keeps its state in memory only", error)
                return
            self.is_failure = True
            log = logger.error if isinstance(error, StoreBroken) else logger.warning
            log("%s. This server keeps its state in memory only, until it is restarted", error)


def open_store(store: OpenedStore | Store | str | os.PathLike[str] | None) -> OpenedStore:
    """Open a store, or the state file with this path; None stands for no store."""
    if isinstance(store, OpenedStore):
        return store
    if not isinstance(store, str | os.PathLike):
        return OpenedStore(store)
    from tidings.store.sqlite import SQLiteStore

    return OpenedStore(SQLiteStore(os.fspath(store)))
