"""The waiting times of a mirror."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tidings.runtime.backoff import Backoff

__all__ = ["Timing"]


@dataclass(frozen=True)
class Timing:
    """All times are in seconds."""

    answer: float = 30.0
    """For one list, with all its pages. A server that starts a script for each list needs more than a few."""
    acknowledgement: float = 10.0
    """For a listen stream. Without it, the lists are polled: a proxy that buffers events never passes it on."""
    min_interval: float = 0.1
    """Between two requests for a list: users do not notice it, and a storm of notifications costs two requests."""
    first_poll: float = 5.0
    """Between two requests for a list of whose changes the server does not notify, and that has no `ttlMs`."""
    longest_poll: float = 60.0
    """The same, for a list that does not change: each unchanged answer makes the time 1.5 times as long."""
    recheck: float = 60.0
    """Between two requests for a list of whose changes the server says that it notifies. Some do so only for a part of
    the changes: FastMCP 4 says it, and sends nothing after `add_tool()`. Tidings servers are not asked again."""
    first_retry: float = 0.5
    longest_retry: float = 15.0
    """After a failure; doubled from the first to the longest, as the MCP Inspector does."""
    random: Callable[[], float] = random.random

    def retry_delay(self, failures: int) -> float:
        """Return the time to wait after a failure that followed this many others."""
        return Backoff(self.first_retry, self.longest_retry, jitter=True, random=self.random).delay(failures)

    def poll_delay(self, planned: float) -> float:
        return planned * (1 + self.random() / 10)
