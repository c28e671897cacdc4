"""What is started again when it has ended by itself: at once, or after a delay if it ends soon after each start."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidings.runtime.backoff import Backoff

__all__ = ["Restarts"]

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0
"""Seconds before the next start, so that a process that ends at once does not use the whole CPU."""

_STABLE = 10.0
"""A process that ran for so many seconds starts again after `_FIRST_DELAY`."""


class Restarts:
    """Says when one process is started. The owner starts it, reports that, and reports its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_DELAY, _LONGEST_DELAY, stable=_STABLE)
        self._since = clock()
        """When it was started, or is to be started."""
        self.is_running = False

    @property
    def delay(self) -> float | None:
        """The seconds until the next start; None while the process runs."""
        return None if self.is_running else max(0.0, self._since - self._clock())

    def start(self) -> None:
        self.is_running, self._since = True, self._clock()

    def end(self) -> None:
        now = self._clock()
        self.is_running, self._since = False, now + self._backoff.fail(now - self._since)
