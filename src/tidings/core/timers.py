"""A heap of timers. Each subscriber has at most one. Cancelled timers are removed soon, so they cost no memory.

It starts no thread and calls nothing: delivery asks for the timers that are due.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidings.core.subscriber import Subscriber

__all__ = ["Timer", "Timers"]


class Timer:
    __slots__ = ("serial", "subscriber", "when")

    def __init__(self, when: float, serial: int, subscriber: Subscriber) -> None:
        self.when = when
        self.serial = serial
        self.subscriber: Subscriber | None = subscriber
        """None if the timer is cancelled."""

    def __lt__(self, other: Timer) -> bool:
        return (self.when, self.serial) < (other.when, other.serial)


class Timers:
    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._serial = 0
        self._cancelled = 0

    def add(self, when: float, subscriber: Subscriber) -> Timer:
        self._serial += 1
        timer = Timer(when, self._serial, subscriber)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer) -> None:
        timer.subscriber = None
        self._cancelled += 1
        # At most half of the heap is cancelled, and each timer is moved a constant number of times.
        if self._cancelled * 2 > len(self._heap):
            self._heap = [timer for timer in self._heap if timer.subscriber is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next(self) -> float | None:
        """Return when the next timer is due."""
        self._drop_cancelled()
        return self._heap[0].when if self._heap else None

    def pop_due(self, now: float) -> list[Subscriber]:
        """Remove the timers that are due. Return their subscribers, the earliest first."""
        due: list[Subscriber] = []
        while (when := self.next()) is not None and when <= now:
            subscriber = heapq.heappop(self._heap).subscriber
            assert subscriber is not None  # `next` drops cancelled timers
            subscriber.timer = None
            due.append(subscriber)
        return due

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0].subscriber is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
