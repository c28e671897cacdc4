"""A limit on the processes of executable tools.

A call beyond the limit waits for its turn, in order. If too many calls wait, the next one fails at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from tidings.errors import TidingsError

__all__ = ["MAX_WAITING", "TooManyCalls", "call_slot"]

MAX_WAITING = 256
"""Calls that may wait. Short tools need about a second for so many; with slow ones, the clients give up earlier."""


class TooManyCalls(TidingsError):
    """Too many calls of executable tools are running and waiting."""


class _Slots:
    def __init__(self) -> None:
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self, limit: int) -> None:
        if self._running < limit:
            self._running += 1
            return
        if len(self._waiting) >= MAX_WAITING:
            raise TooManyCalls(
                f"{self._running} tools are running and {MAX_WAITING} calls are waiting; try again later, "
                "or raise [tools] max_processes in tidings.toml"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # cancelled right after its turn came
                self.release()
            raise

    def release(self) -> None:
        """Pass the slot on to the next call that waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = WeakKeyDictionary()
"""By event loop, because a call can only wait for calls in its own loop."""


@asynccontextmanager
async def call_slot(limit: int) -> AsyncIterator[None]:
    """Wait until fewer than `limit` calls run. Raises `TooManyCalls` if too many are waiting."""
    slots = _slots.setdefault(asyncio.get_running_loop(), _Slots())
    await slots.acquire(limit)
    try:
        yield
    finally:
        slots.release()
