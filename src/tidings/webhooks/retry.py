"""The delay before a failed delivery is tried again."""

from __future__ import annotations

from tidings.runtime.backoff import Backoff

__all__ = ["MAX_BACKOFF", "MAX_RETRY_AFTER", "retry_delay"]

MAX_BACKOFF = 3600.0
"""Seconds between two attempts, unless the receiver asks for more."""
MAX_RETRY_AFTER = 24 * 3600.0
"""Seconds that a receiver may ask for. No delay is longer."""


def retry_delay(attempts: int, backoff: float, retry_after: float | None) -> float:
    """Return the seconds to wait after a number of failed attempts in a row.

    `backoff` is the delay after the first one, and is doubled each time. `retry_after` is what the receiver asks for.
    """
    delay = Backoff(backoff, MAX_BACKOFF, jitter=True).delay(attempts - 1)
    return max(delay, min(retry_after or 0.0, MAX_RETRY_AFTER))
