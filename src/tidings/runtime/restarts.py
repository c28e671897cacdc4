"""Decide when a process that has ended is started again."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidings.runtime.backoff import Backoff

__all__ = ["Restarts"]

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0
"""Seconds before the next start, so that a process that ends at once does not use the whole CPU."""

_STABLE = 10.0
"""A process that was ready for so many seconds starts again after `_FIRST_DELAY`."""


class Restarts:
    """The starts of one process. The owner starts it, and reports that, when it is ready, and its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_DELAY, _LONGEST_DELAY, stable=_STABLE)
        self._ready_at: float | None = None
        self._due_at = clock()
        self.is_running = False

    @property
    def delay(self) -> float | None:
        """The seconds until the next start; None while the process runs."""
        return None if self.is_running else max(0.0, self._due_at - self._clock())

    def start(self) -> None:
        self.is_running, self._ready_at = True, None

    def mark_ready(self) -> None:
        """Count the time from now on as work: a start that fails after a long time has not worked."""
        self._ready_at = self._clock()

    def end(self) -> None:
        now = self._clock()
        worked = 0.0 if self._ready_at is None else now - self._ready_at
        self.is_running, self._due_at = False, now + self._backoff.fail(worked)
