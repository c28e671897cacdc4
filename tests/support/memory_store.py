"""A store in memory, for restarts of a server within one process. Tests compare the SQLite store with it."""

from __future__ import annotations

import secrets
from dataclasses import replace

from tidings.core.model import Feature, Item
from tidings.store import Batch, State, StoreBusy, journal_part


class MemoryStore:
    """A store that lasts as long as its process."""

    def __init__(self) -> None:
        self._state = State(secrets.token_hex(8), 0)
        self._items: dict[tuple[Feature, str], Item] = {}
        self._is_open = False

    def open(self) -> State:
        if self._is_open:
            raise StoreBusy("this store in memory is in use by another server; close that server first")
        self._is_open = True
        self._state.run += 1
        return self.peek()

    def peek(self) -> State:
        """Return the state without opening the store."""
        state = self._state
        return replace(
            state,
            items=list(self._items.values()),
            versions=dict(state.versions),
            contents=dict(state.contents),
            journal=list(state.journal),
            floors=dict(state.floors),
            durables=dict(state.durables),
            events=dict(state.events),
        )

    def write(self, batch: Batch) -> None:
        state = self._state
        if batch.replaces_items:
            self._items.clear()
        for key, item in batch.items.items():
            if item is None:
                self._items.pop(key, None)
            else:
                self._items[key] = item
        state.versions.update(batch.versions)
        for uri, version in batch.contents.items():
            state.contents.pop(uri, None)
            state.contents[uri] = version
        state.contents = {uri: each for uri, each in state.contents.items() if each.revision > batch.forgotten}
        state.forgotten = max(state.forgotten, batch.forgotten)
        state.journal += batch.changes
        state.floors.update(batch.floors)
        state.journal = [
            change for change in state.journal if change.revision > state.floors.get(journal_part(change), 0)
        ]
        for name, durable in batch.durables.items():
            if durable is None:
                state.durables.pop(name, None)
            else:
                state.durables[name] = durable
        for row, event in batch.events.items():
            if event is None:
                state.events.pop(row, None)
            else:
                state.events[row] = event

    def close(self) -> None:
        self._is_open = False
