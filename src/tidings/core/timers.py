"""When to look at which subscriber again: at most one date each, and no trace of those that are gone."""

from __future__ import annotations

import heapq
from typing import Any

__all__ = ["Timer", "Timers"]


class Timer:
    """One entry of the agenda. It is cancelled by forgetting whom it is for."""

    __slots__ = ("serial", "when", "who")

    def __init__(self, when: float, serial: int, who: Any) -> None:
        self.when = when
        self.serial = serial
        self.who = who

    def __lt__(self, other: Timer) -> bool:
        return (self.when, self.serial) < (other.when, other.serial)


class Timers:
    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._serial = 0
        self._cancelled = 0

    def add(self, when: float, who: Any) -> Timer:
        self._serial += 1
        date = Timer(when, self._serial, who)
        heapq.heappush(self._heap, date)
        return date

    def cancel(self, date: Timer) -> None:
        date.who = None
        self._cancelled += 1
        # Half of the heap at most is waste, and each date is moved a constant number of times.
        if self._cancelled * 2 > len(self._heap):
            self._heap = [kept for kept in self._heap if kept.who is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next(self) -> float | None:
        self._drop_cancelled()
        return self._heap[0].when if self._heap else None

    def pop(self, now: float) -> Any:
        """Whom to look at, or None when nobody's date has come."""
        self._drop_cancelled()
        return heapq.heappop(self._heap).who if self._heap and self._heap[0].when <= now else None

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0].who is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
