"""One recorded change: which subscribers were told of it, which were not and why, and how many clients fetched it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from tidings.core.model import Change, Topic, Version

__all__ = ["FETCH_TIMEOUT", "ClientOutcome", "OutcomeState", "PublishedChange"]

FETCH_TIMEOUT: Final = 30.0
"""Seconds after a notification within which its client is expected to fetch."""


class OutcomeState(StrEnum):
    """The state of one change for one subscriber."""

    TOLD = "told"
    PENDING = "pending"
    SUPPRESSED = "suppressed"
    SUPERSEDED = "superseded"
    """A later change of the same topic was told instead."""
    CLOSED = "closed"
    """The subscription ended while the change was pending."""


_NO_COUNTS: Final = dict.fromkeys(OutcomeState, 0)


class ClientOutcome:
    """The outcome of one change for one subscriber that was not told immediately."""

    __slots__ = ("is_fetched", "latency", "reason", "state", "time")

    def __init__(self, state: OutcomeState, reason: str | None, time: float) -> None:
        self.state = state
        self.reason = reason
        self.time = time
        """When it reached this state."""
        self.latency: float | None = None
        self.is_fetched = False


class PublishedChange(msgspec.Struct, eq=False, kw_only=True):
    """The changes of one topic in one publication. A struct, because it is faster to construct than a dataclass."""

    id: int
    topic: Topic
    version: Version
    time: float
    changes: tuple[Change, ...]
    """The first ones, if there were too many for the record."""
    keys: list[Topic]
    """The watched features, URIs and patterns that match the topic."""
    is_truncated: bool
    """Whether some items or deliveries were dropped."""
    is_missing_deliveries: bool = False
    """Whether `deliveries` was dropped."""
    size: int
    """Bytes of the definitions."""
    published: float
    """When all subscribers that were told immediately had been told."""
    latency: float = 0.0
    """The latency of the subscribers that were told immediately."""
    max_latency: float = 0.0
    reached: int
    """The number of subscribers that watched the topic."""
    unable: int = 0
    """The number of those whose fetches can't be seen: callbacks, webhooks and stdio."""
    counts: dict[OutcomeState, int] = msgspec.field(default_factory=_NO_COUNTS.copy)
    """The number of deliveries in each state, also of those that were dropped."""
    deliveries: dict[int, ClientOutcome] = msgspec.field(default_factory=dict)
    """The deliveries that were not immediate, by the id of the client."""
    fetched: int = 0
    """The number of clients that were told and fetched in time."""
    deadline: float = 0.0
    """When the time to fetch ends for the client that was told last."""

    @property
    def told(self) -> int:
        """The number of subscribers that were told, immediately or later."""
        if not self.deliveries and not self.is_missing_deliveries:
            return self.reached
        counts = self.counts
        return self.reached - sum(counts.values()) + counts[OutcomeState.TOLD]

    def not_fetched(self, now: float) -> int:
        """Return the number of clients that were told, and have not fetched in time."""
        if now < self.published + FETCH_TIMEOUT:
            return 0
        waiting = 0
        if now < self.deadline:
            start = now - FETCH_TIMEOUT
            waiting = sum(
                each.state is OutcomeState.TOLD and not each.is_fetched and each.time > start
                for each in self.deliveries.values()
            )
        return max(0, self.told - self.unable - self.fetched - waiting)
