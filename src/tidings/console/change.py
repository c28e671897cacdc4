"""One recorded change: which subscribers were told of it, which were not and why, and how many clients fetched it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from tidings.core.model import Change, Topic, Version

__all__ = ["FETCH_TIMEOUT", "Delivery", "PublishedChange", "State"]

FETCH_TIMEOUT: Final = 30.0
"""Seconds within which a client that was told is expected to fetch."""


class State(StrEnum):
    """What became of one change for one subscriber."""

    TOLD = "told"
    PENDING = "pending"
    SUPPRESSED = "suppressed"
    SUPERSEDED = "superseded"
    """A later change of the same topic was told instead."""
    CLOSED = "closed"
    """The subscription ended while the change was pending."""


_NO_COUNTS: Final = dict.fromkeys(State, 0)


class Delivery:
    """One change for one subscriber that was not told immediately."""

    __slots__ = ("is_fetched", "latency", "reason", "state", "time")

    def __init__(self, state: State, reason: str | None, time: float) -> None:
        self.state = state
        self.reason = reason
        self.time = time
        """When it reached this state."""
        self.latency: float | None = None
        self.is_fetched = False


class PublishedChange(msgspec.Struct, eq=False, kw_only=True):
    """The changes of one topic in one publication. A struct, because one is made for each publication."""

    id: int
    topic: Topic
    version: Version
    time: float
    changes: tuple[Change, ...]
    """At most `_MAX_ITEMS`."""
    keys: list[Topic]
    """The subscriptions that matched."""
    is_truncated: bool
    """Whether items or exceptions are missing."""
    is_missing_exceptions: bool = False
    size: int
    """Bytes of the definitions."""
    published: float
    latency: float = 0.0
    """Of the subscribers that were told immediately."""
    max_latency: float = 0.0
    reached: int
    """The subscribers that had to be told."""
    unable: int = 0
    """Those among them that fetch nothing: callbacks and webhooks."""
    counts: dict[State, int] = msgspec.field(default_factory=_NO_COUNTS.copy)
    """The exceptions that are in each state now."""
    deliveries: dict[int, Delivery] = msgspec.field(default_factory=dict)
    """The exceptions, by the id of the client."""
    fetched: int = 0
    """The clients that were told and fetched in time."""
    deadline: float = 0.0
    """When the last client that was told has to have fetched."""

    @property
    def told(self) -> int:
        if not self.deliveries and not self.is_missing_exceptions:
            return self.reached
        counts = self.counts
        return self.reached - sum(counts.values()) + counts[State.TOLD]

    def not_fetched(self, now: float) -> int:
        """Return the number of clients that were told, and have not fetched in time."""
        if now < self.published + FETCH_TIMEOUT:
            return 0
        waiting = 0
        if now < self.deadline:
            start = now - FETCH_TIMEOUT
            waiting = sum(
                each.state is State.TOLD and not each.is_fetched and each.time > start
                for each in self.deliveries.values()
            )
        return max(0, self.told - self.unable - self.fetched - waiting)
