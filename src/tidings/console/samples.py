"""Samples of the last five minutes, one per second: the number of deliveries and their latency."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tidings.core.counts import BOUNDS, Latency

__all__ = ["Sample", "Samples", "percentile"]

_MAX_SAMPLES = 300


class Sample(NamedTuple):
    time: float
    deliveries: int
    """The deliveries since the previous sample."""
    seconds: float
    """The seconds since the previous sample."""
    p95: float | None


class Samples:
    def __init__(self, latency: Latency, now: float) -> None:
        self._latency = latency
        self._counts = list(latency.counts)
        self._time = now
        self.all: deque[Sample] = deque(maxlen=_MAX_SAMPLES)

    def take(self, now: float) -> Sample:
        counts = list(self._latency.counts)
        new = [after - before for after, before in zip(counts, self._counts, strict=True)]
        sample = Sample(now, sum(new), max(0.001, now - self._time), percentile(new, 0.95))
        self._counts, self._time = counts, now
        self.all.append(sample)
        return sample

    @property
    def deliveries_per_second(self) -> float:
        """The mean of the last ten samples."""
        last = list(self.all)[-10:]
        return sum(each.deliveries for each in last) / sum(each.seconds for each in last) if last else 0.0


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return a percentile of a histogram, interpolated within its bucket; None if the histogram is empty.

    The histogram has the bounds of `Latency`.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, number in enumerate(counts):
        if number and below + number >= rank:
            low = BOUNDS[index - 1] if index else 0.0
            high = BOUNDS[index] if index < len(BOUNDS) else BOUNDS[-1]
            return low + (high - low) * (rank - below) / number
        below += number
    return BOUNDS[-1]
