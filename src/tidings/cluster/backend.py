"""The backend protocol: a key-value table that all replicas of a server share, and calls between them.

All replicas see the writes to the table in one order. The backend knows nothing of items and clients: keys are text,
values are bytes. `tidings.cluster.memory` is for replicas in one process, `tidings.cluster.nats` for all others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from tidings.errors import TidingsError

__all__ = [
    "Backend",
    "CallFailed",
    "CallHandler",
    "CallTooLarge",
    "Entry",
    "NotDelivered",
    "OnProgress",
    "TooLarge",
    "Unavailable",
    "Watcher",
    "Write",
]


class Unavailable(TidingsError):
    """The backend cannot be reached now, or refused a write. The message says why."""


class TooLarge(Unavailable):
    """A value is larger than the backend accepts. The message names key and size. None of the writes is stored."""


class CallFailed(TidingsError):
    """A call to another replica has no result: the replica is gone, its handler failed, or the timeout has expired."""


class NotDelivered(CallFailed):
    """The replica never got the call, so the caller can call another replica."""


class CallTooLarge(CallFailed):
    """The call is larger than the backend accepts, and was not sent. The message names the size."""


class Write(NamedTuple):
    key: str
    """Any text; the backend encodes it. The part before the first slash is the kind of the entry."""
    value: bytes | None
    """None to delete the key."""
    ttl: float | None = None
    """Seconds, at least 1, after which the backend deletes the key unless it is written again."""
    expected: int | None = None
    """The order of the entry that this write replaces. If the key has another entry, or none, nothing is written."""


class Entry(NamedTuple):
    """The current value of a key, as the watcher sees it."""

    key: str
    value: bytes | None
    """None if the key was deleted or has expired."""
    order: int
    """The position of the write among all writes. It grows with each write, also when the table is created again."""


class Watcher(Protocol):
    """Gets the state of the table. All methods are called on the event loop of `Backend.run()`."""

    def load(self, epoch: str, entries: Sequence[Entry], order: int) -> None:
        """Replace all entries by this snapshot of the table.

        The backend calls this after the first connect, and whenever the watcher may have missed writes. `epoch`
        identifies the table: a table that was created again has a new epoch. `order` is the order of the last write in
        the snapshot, or that of the creation of an empty table."""

    def apply(self, entries: Sequence[Entry]) -> None:
        """Apply writes that came after the snapshot, in order. They include the writes of this replica.

        The backend may skip a write if a later write of the same key follows."""

    def lose(self, reason: str) -> None:
        """Continue without the backend. It calls `load` or `apply` when it can be reached again."""


OnProgress = Callable[[bytes], None]
CallHandler = Callable[[bytes, OnProgress], Awaitable[bytes]]
"""Handle a call from another replica, and return the reply. It may send progress before that. The backend cancels it if
the caller cancels or disconnects, or if the timeout expires."""


class Backend(Protocol):
    async def run(self, name: str, replica: str, watcher: Watcher, handler: CallHandler) -> None:
        """Connect, watch the table of the server `name`, and handle the calls to `replica`, until cancelled.

        It retries forever with back-off while the backend cannot be reached. On cancellation it disconnects."""

    async def write(self, writes: Sequence[Write]) -> list[int | None]:
        """Store the writes one after the other. When all are stored, return the `order` of each new entry, or None for
        a write that did not find its `expected` entry. Raise `Unavailable` if some may not be stored."""

    # The timeout is a parameter because the handler on the other replica gets it too.
    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109
        """Return the reply of another replica. Cancelling this cancels the handler there. Raise `CallFailed`;
        raise `NotDelivered` if it is certain that the handler never started."""
