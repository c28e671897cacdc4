"""The delays between attempts at something that fails."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Delays that double from `first` to `longest` seconds, with each failure in a row.

    With `spreads`, up to half of each delay is left out by chance, so that those who failed together do not come back
    together. What has worked for `stable` seconds before it failed has failed for the first time."""

    def __init__(
        self,
        first: float,
        longest: float,
        *,
        spreads: bool = False,
        stable: float = float("inf"),
        random: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._longest = longest
        self._spreads = spreads
        self._stable = stable
        self._random = random
        self._failures = 0

    def delay(self, earlier: int) -> float:
        """Return the seconds to wait after a failure that followed so many others."""
        delay = min(self._first * 2.0 ** min(earlier, 30), self._longest)
        return delay * (0.5 + self._random() / 2) if self._spreads else delay

    def fail(self, lasted: float = 0.0) -> float:
        """Count a failure of what has worked for `lasted` seconds, and return the seconds to wait."""
        if lasted >= self._stable:
            self.reset()
        self._failures += 1
        return self.delay(self._failures - 1)

    def reset(self) -> None:
        """Count no failure any longer, because an attempt has succeeded."""
        self._failures = 0
