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
    """A call to another replica got no reply: the replica is gone, or the timeout is over."""


class NotDelivered(CallFailed):
    """The replica never got the call, so another one can be called instead."""


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
    """The present value of a key, as the watcher sees it."""

    key: str
    value: bytes | None
    """None if the key was deleted or has expired."""
    order: int
    """A number that grows with each write, also after the table was lost and created again."""


class Watcher(Protocol):
    """Gets the state of the table. All methods are called on the event loop of `Backend.run()`."""

    def load(self, epoch: str, entries: Sequence[Entry], order: int) -> None:
        """Replace everything by this snapshot of the table. Called after the first connect, and whenever writes may
        have been missed. `epoch` identifies the table: one that was created again has another. `order` is that of the
        last write in the snapshot, or of the creation of an empty table."""

    def apply(self, entries: Sequence[Entry]) -> None:
        """Apply writes that came after the snapshot, in order. The own writes of this replica come this way too.

        A write may be skipped if a later one of the same key follows."""

    def lose(self, reason: str) -> None:
        """Continue without the backend. `load` or `apply` follows when it is back."""


OnProgress = Callable[[bytes], None]
CallHandler = Callable[[bytes, OnProgress], Awaitable[bytes]]
"""Handles a call from another replica and returns its reply; may send progress before. It is cancelled if the caller
cancels or goes away, or if the timeout is over."""


class Backend(Protocol):
    async def run(self, name: str, replica: str, watcher: Watcher, handler: CallHandler) -> None:
        """Connect, watch the table of the server `name`, and handle the calls to `replica`, until cancelled.

        It retries forever with back-off while the backend cannot be reached. On cancellation it disconnects."""

    async def write(self, writes: Sequence[Write]) -> list[int | None]:
        """Write in the given order. Return the order of each entry when all are stored; None for a write that did not
        find the `expected` entry. Raise `Unavailable` if it is not certain that all are stored."""

    # The timeout is a parameter because the handler on the other replica gets it too.
    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109
        """Return the reply of another replica. Cancelling this cancels the handler there. Raise `CallFailed`;
        raise `NotDelivered` if it is certain that the handler never started."""
