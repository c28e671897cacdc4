"""The delays between attempts at something that fails."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Delays that double from `first` to `longest` seconds, with each failure in a row.

    With `jitter`, shorten each delay by a random part, up to half, so that those who failed together do not come back
    together. A failure after `stable` seconds of work counts as the first one."""

    def __init__(
        self,
        first: float,
        longest: float,
        *,
        jitter: bool = False,
        stable: float = float("inf"),
        random: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._stable = stable
        self._random = random
        self._failures = 0

    def delay(self, failures_before: int) -> float:
        """Return the seconds to wait after a failure that follows so many others."""
        delay = min(self._first * 2.0 ** min(failures_before, 30), self._longest)
        return delay * (0.5 + self._random() / 2) if self._jitter else delay

    def fail(self, lasted: float = 0.0) -> float:
        """Count a failure after `lasted` seconds of work, and return the seconds to wait."""
        if lasted >= self._stable:
            self.reset()
        self._failures += 1
        return self.delay(self._failures - 1)

    def reset(self) -> None:
        """Count no failure any longer, because an attempt has succeeded."""
        self._failures = 0
