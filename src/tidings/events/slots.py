"""Limit the requests in progress, in total and per receiver, so that a slow receiver does not delay the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidings.wire.addresses import origin_of

__all__ = ["RequestSlots"]

_MAX_REQUESTS = 256
"""Requests in progress. Each takes a connection."""
_MAX_PER_ORIGIN = 32
"""Requests in progress to one receiver that responds: an eighth of all, because it may hang later."""
_MAX_FAILING = 4096
"""Failing receivers that are remembered while no request to them is in progress."""


class _Origin:
    __slots__ = ("active", "is_failing", "waiting")

    def __init__(self) -> None:
        self.active = 0
        self.is_failing = False
        self.waiting: deque[asyncio.Future[None]] = deque()

    def grant_slots(self) -> None:
        """Give the free slots to the requests that wait the longest. `active` counts each from here on."""
        limit = 1 if self.is_failing else _MAX_PER_ORIGIN
        while self.waiting and self.active < limit:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.active += 1


class RequestSlots:
    """Limits the requests of one event loop."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(_MAX_REQUESTS)
        self._origins: dict[str, _Origin] = {}

    @asynccontextmanager
    async def take(self, url: str) -> AsyncIterator[None]:
        """Wait for a slot for a request to a URL."""
        key = origin_of(url)
        origin = self._origins.setdefault(key, _Origin())
        turn = asyncio.get_running_loop().create_future()
        origin.waiting.append(turn)
        origin.grant_slots()
        try:
            await turn
            async with self._all:
                yield
        finally:
            if not turn.cancelled():  # otherwise it never had a slot
                origin.active -= 1
                origin.grant_slots()
                if not origin.active and self._is_forgettable(origin):
                    del self._origins[key]

    def _is_forgettable(self, origin: _Origin) -> bool:
        # Clients choose the hosts, so the number of remembered failures must be limited.
        return not origin.is_failing or len(self._origins) > _MAX_FAILING

    def report(self, url: str, *, is_failing: bool) -> None:
        """Record whether a request failed. A failing receiver gets one request at a time until one succeeds."""
        if (origin := self._origins.get(origin_of(url))) is not None:
            origin.is_failing = is_failing
