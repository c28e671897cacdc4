"""The delay before a failed delivery is tried again."""

from __future__ import annotations

import random

__all__ = ["MAX_BACKOFF", "MAX_RETRY_AFTER", "retry_delay"]

MAX_BACKOFF = 3600.0
"""Seconds between two attempts, unless the receiver asks for more."""
MAX_RETRY_AFTER = 24 * 3600.0
"""Seconds that a receiver may ask for. No delay is longer."""


def retry_delay(attempts: int, backoff: float, retry_after: float | None) -> float:
    """Return the seconds to wait after a number of failed attempts in a row.

    `backoff` is the delay after the first one, and is doubled each time. `retry_after` is what the receiver asks for.
    """
    delay = min(backoff * 2.0 ** min(attempts - 1, 30), MAX_BACKOFF)
    # Jitter, so that deliveries that failed together are not retried together.
    return max(delay * random.uniform(0.5, 1.0), min(retry_after or 0.0, MAX_RETRY_AFTER))
