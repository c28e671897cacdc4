"""How often what happened: plain integers that the hub and the lanes add to, and that metrics are read from.

Nothing here is per delivery. A fan-out is counted and timed a batch at a time, so that a delivery costs the same with
and without it. Not an exporter: what becomes of the numbers is `tidings.telemetry.metrics`'.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from tidings.core.model import Feature, Topic

__all__ = ["BOUNDS", "Counts", "Latency", "SuppressionReason", "batches", "kind_of"]

T = TypeVar("T")

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Seconds, the upper ends of the latency's buckets: from one stream on an idle machine to a reader that is away."""

_BATCH = 64
"""Deliveries that are timed together. The clock is read after the last one, so that no latency is understated, and none
is overstated by more than it takes to write to so many streams: well below a millisecond."""


class SuppressionReason(StrEnum):
    """Why a subscriber was not told of a change by a notification of its own."""

    SAME_DIGEST = "same_digest"
    """What it was told last is true, again or still."""
    MUTED = "muted"
    FILTERED = "filtered"
    RATE = "rate"
    """The policy's pace held the topic back, and a later notification said it all."""
    UNSUBSCRIBED = "unsubscribed"
    """It left, or ended the subscription, before it was told."""


class Latency:
    """A histogram of seconds."""

    __slots__ = ("counts", "sums")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """One per bucket, not cumulative; the last one has no upper end."""
        self.sums = [0.0] * (len(BOUNDS) + 1)

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = bisect_left(BOUNDS, seconds)
        self.counts[bucket] += count
        if seconds > 0.0:  # the machine's clock may be set back
            self.sums[bucket] += seconds * count


class Counts:
    """All that is counted in one process, for one hub. Whoever adds holds the hub's lock, or is the only one to add."""

    __slots__ = (
        "bytes",
        "changes",
        "closed",
        "coalesced",
        "cut_off",
        "failures",
        "latency",
        "open",
        "runs",
        "sent",
        "skipped",
        "suppressed",
    )  # fmt: skip

    def __init__(self) -> None:
        self.changes: Counter[tuple[str, str]] = Counter()
        """By kind of topic and operation."""
        self.sent: Counter[str] = Counter()
        """Notifications handed to subscribers, by kind of topic."""
        self.suppressed: Counter[SuppressionReason] = Counter()
        self.coalesced = 0
        """Changes that were told together with a later one, because their reader was not ready."""
        self.bytes = 0
        """Of notifications, as the lanes wrote them."""
        self.latency = Latency()
        """From when a change could be told until it was handed to the subscriber."""
        self.open: Counter[tuple[str, str]] = Counter()
        """Subscribers by era and transport."""
        self.closed: Counter[str] = Counter()
        """Subscribers by why they were closed."""
        self.cut_off: Counter[str] = Counter()
        """Streams that were ended against their reader's will, by reason."""
        self.runs: Counter[str] = Counter()
        """Calls of tools, by outcome."""
        self.failures: Counter[str] = Counter()
        """What failed inside and was survived, by what it was."""
        self.skipped = 0
        """Those of fan-outs who were not told there and then. Who counts a batch takes off those that were added."""

    def skip(self, why: SuppressionReason | None = None) -> None:
        self.skipped += 1
        if why is not None:
            self.suppressed[why] += 1

    def add_sent(self, topic: Topic, seconds: float, count: int = 1) -> None:
        """So many were told, that long after there was something to tell them."""
        if count:
            self.sent[kind_of(topic)] += count
            self.latency.add(seconds, count)

    def suppress(self, why: SuppressionReason, count: int = 1) -> None:
        if count:
            self.suppressed[why] += count


def batches(subscribers: tuple[T, ...]) -> Iterable[tuple[T, ...]]:
    """The subscribers of a fan-out, as they are counted and timed together."""
    if len(subscribers) <= _BATCH:
        return (subscribers,)
    return (subscribers[start : start + _BATCH] for start in range(0, len(subscribers), _BATCH))


def kind_of(topic: Topic) -> str:
    """What a topic is counted under: its list, or `contents`, since there may be any number of URIs."""
    return _KINDS.get(topic, "contents")


_KINDS: dict[Topic, str] = {feature: feature.value for feature in Feature}
