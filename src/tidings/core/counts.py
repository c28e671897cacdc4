"""Counters: plain integers that the hub and the transports add to, and that metrics are read from.

Nothing is counted per delivery. Deliveries of one change are counted and timed in batches, so that counting costs
nothing measurable. `tidings.telemetry.metrics` exports the counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from tidings.core.model import Feature, Topic

__all__ = ["BOUNDS", "Counts", "Latency", "SuppressionReason", "batches", "topic_kind"]

T = TypeVar("T")

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""The upper bounds of the latency buckets, in seconds. One stream on an idle machine is in the first buckets, an absent
client in the last."""

_BATCH_SIZE = 64
"""Deliveries that are timed together. The clock is read after the last one, so no latency is understated. It is
overstated by less than a millisecond, the time for so many writes."""


class SuppressionReason(StrEnum):
    """Why a subscriber got no notification for a change."""

    SAME_DIGEST = "same_digest"
    """The content that it was told last is the present one."""
    MUTED = "muted"
    FILTERED = "filtered"
    RATE = "rate"
    """The policy delayed the topic, and a later notification contained the change."""
    UNSUBSCRIBED = "unsubscribed"
    """It unsubscribed or left before the delivery."""


class Latency:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """One per bucket, not cumulative. The last bucket has no upper bound."""
        self.sums = [0.0] * (len(BOUNDS) + 1)

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = bisect_left(BOUNDS, seconds)
        self.counts[bucket] += count
        if seconds > 0.0:  # the clock may be set back
            self.sums[bucket] += seconds * count


class Counts:
    """The counters of one hub. Add to them with the hub's lock held, or from one thread only."""

    def __init__(self) -> None:
        self.changes: Counter[tuple[str, str]] = Counter()
        """By kind of topic and operation."""
        self.sent: Counter[str] = Counter()
        """Notifications delivered to subscribers, by kind of topic."""
        self.suppressed: Counter[SuppressionReason] = Counter()
        self.coalesced = 0
        """Changes that were delivered together with a later one, because their subscriber was busy."""
        self.bytes = 0
        """Bytes of notifications that the transports wrote."""
        self.latency = Latency()
        """The time from when a change could be delivered until it was."""
        self.open: Counter[tuple[str, str]] = Counter()
        """Open subscribers, by era and transport."""
        self.closed: Counter[str] = Counter()
        """Closed subscribers, by reason."""
        self.cut_off: Counter[str] = Counter()
        """Streams that the server ended, by reason."""
        self.events: Counter[str] = Counter()
        """Deliveries of MCP Events, by outcome."""
        self.runs: Counter[str] = Counter()
        """Tool calls, by outcome."""
        self.failures: Counter[str] = Counter()
        """Errors in user code and in Tidings that were caught, by place."""
        self.skipped = 0
        """Subscribers that did not get a change immediately. Delivery compares the values before and after a batch."""

    def skip(self, reason: SuppressionReason | None = None) -> None:
        self.skipped += 1
        if reason is not None:
            self.suppressed[reason] += 1

    def add_sent(self, topic: Topic, seconds: float, count: int = 1) -> None:
        """Add notifications that were delivered, and the latency that they had."""
        if count:
            self.sent[topic_kind(topic)] += count
            self.latency.add(seconds, count)

    def suppress(self, reason: SuppressionReason, count: int = 1) -> None:
        if count:
            self.suppressed[reason] += count


def batches(subscribers: tuple[T, ...]) -> Iterable[tuple[T, ...]]:
    """Split the subscribers of a change into those that are counted and timed together."""
    if len(subscribers) <= _BATCH_SIZE:
        return (subscribers,)
    return (subscribers[start : start + _BATCH_SIZE] for start in range(0, len(subscribers), _BATCH_SIZE))


def topic_kind(topic: Topic) -> str:
    """Return the label of a topic in counters: its feature, or `contents`, because there may be any number of URIs."""
    return _KINDS.get(topic, "contents")


_KINDS: dict[Topic, str] = {feature: feature.value for feature in Feature}
