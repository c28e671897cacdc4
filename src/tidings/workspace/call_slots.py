"""A limit on the processes of executable tools.

A call beyond the limit waits for its turn, in order. If too many calls wait, the next one fails at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from anyio import CapacityLimiter

from tidings.errors import TidingsError

__all__ = ["MAX_WAITING", "TooManyCalls", "call_slot"]

MAX_WAITING = 256
"""Calls that may wait. Short tools need about a second for so many; with slow ones, the clients give up earlier."""

_limiters: WeakKeyDictionary[asyncio.AbstractEventLoop, CapacityLimiter] = WeakKeyDictionary()
"""By event loop, because a call can only wait for calls in its own loop."""


class TooManyCalls(TidingsError):
    """Too many calls of executable tools are running and waiting."""


@asynccontextmanager
async def call_slot(limit: int) -> AsyncIterator[None]:
    """Wait until fewer than `limit` calls run. Raises `TooManyCalls` if too many are waiting."""
    limiter = _limiters.setdefault(asyncio.get_running_loop(), CapacityLimiter(limit))
    limiter.total_tokens = limit  # it may have changed since the last call
    waiting = limiter.statistics().tasks_waiting
    if limiter.available_tokens <= 0 and waiting >= MAX_WAITING:
        raise TooManyCalls(
            f"{limiter.borrowed_tokens} tools are running and {waiting} calls are waiting; try again later, "
            "or raise [tools] max_processes in tidings.toml"
        )
    async with limiter:
        yield
