"""Lists that change, and the ways to follow them: what `Mirror` and `MirrorGroup` have in common."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from tidings.client.snapshot import Detected, ItemChange, Listing, ListName, Lists, Snapshot
from tidings.core.model import Operation
from tidings.errors import Disconnected

__all__ = ["ChangingLists", "call_safely"]

_log = logging.getLogger(__name__)
_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class ChangingLists(Lists):
    """The newest snapshot of some lists. A subclass publishes the snapshots, and runs the callbacks."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._callbacks: list[tuple[Operation, Callable[[ItemChange], Any]]] = []

    @property
    def listings(self) -> Mapping[ListName, Listing]:
        return self._snapshot.listings

    def snapshot(self) -> Snapshot:
        """Return the present lists as a view that never changes, for example for one turn of an agent."""
        return self._snapshot

    async def next_snapshot(self, seen: Snapshot) -> Snapshot | None:
        """Return the present lists as soon as they are not `seen`; None if the lists are closed before that."""
        while self._snapshot is seen:
            if self._is_closed:
                return None
            await self._changed.wait()
        return self._snapshot

    def changes(self) -> AsyncIterator[ItemChange]:
        """Iterate over the changes from now on, until the lists are closed.

        Each step compares the present lists with those that this iterator has seen. So a slow reader costs no memory,
        and does not see an item that came and went meanwhile.
        """
        return self._changes_since(self._snapshot)

    async def _changes_since(self, seen: Snapshot) -> AsyncIterator[ItemChange]:
        while (present := await self.next_snapshot(seen)) is not None:
            for change in present.changes_since(seen):
                yield change
            seen = present

    async def wait_for(self, name: str, list: ListName = "tools") -> Any:
        """Return an item as soon as the server has it: a tool, unless another list is named."""
        while name not in (items := self._snapshot.listings[list].items):
            if await self.next_snapshot(self._snapshot) is None:
                raise Disconnected(f"closed before the server had {name!r}")
        return items[name]

    def on_added(self, callback: _Callback) -> _Callback:
        """Call `callback(change)` for each added item. The callback may be a coroutine function."""
        return self._on(Operation.ADDED, callback)

    def on_removed(self, callback: _Callback) -> _Callback:
        return self._on(Operation.REMOVED, callback)

    def on_updated(self, callback: _Callback) -> _Callback:
        return self._on(Operation.UPDATED, callback)

    def _on(self, operation: Operation, callback: _Callback) -> _Callback:
        self._callbacks.append((operation, callback))
        return callback

    async def _call_back(self, changes: AsyncIterator[ItemChange]) -> None:
        async for change in changes:
            for operation, callback in list(self._callbacks):
                if operation is change.operation:
                    await call_safely(callback, change)

    def _publish(self, snapshot: Snapshot, detected: Detected | None = None) -> None:
        for name, listing in snapshot.listings.items():
            if listing is not self._snapshot.listings[name]:
                listing.detected = detected
        self._snapshot = snapshot
        self._wake()

    def _wake(self) -> None:
        """Wake everything that waits for another snapshot or status."""
        self._changed.set()
        self._changed = asyncio.Event()


async def call_safely(function: Callable[[Any], Any], argument: Any) -> None:
    """Call a function of the user, which may be a coroutine function. Log what it raises."""
    try:
        if inspect.isawaitable(result := function(argument)):
            await result
    except Exception:
        _log.exception("%r raised", function)
