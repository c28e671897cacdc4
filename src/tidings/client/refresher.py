"""`Refresher`: fetches one list, or one watched content, again whenever it is out of date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import mcp_types as types
from mcp.shared.exceptions import MCPError

from tidings.client.snapshot import Detected, FoundBy
from tidings.client.timing import Timing
from tidings.core.redact import one_line
from tidings.errors import TidingsError

__all__ = ["Refresher"]


class Refresher:
    """Calls `fetch` after each `mark()`, and after each `interval`; again if it returns False.

    One fetch is running and at most one is queued, whatever the number of marks. Fetches run one after the other, so an
    old answer never replaces a newer one. A fetch that fails is repeated, after increasing times.

    A refresher belongs to one connection. `on_change` is called when any of its public attributes has changed.
    """

    def __init__(
        self, name: str, fetch: Callable[[Refresher], Awaitable[bool]], timing: Timing, on_change: Callable[[], None]
    ) -> None:
        self.stale_since: float | None = None
        """The time (`time.time()`) since which what was fetched may be out of date; None if it is current."""
        self.error: str | None = None
        """The error of the last fetch."""
        self.is_loaded = False
        """Whether a fetch has succeeded, or none was necessary."""
        self.interval: float | None = None
        """Seconds until the next fetch without a mark; None if there is no need for one."""
        self.task: asyncio.Task[None] | None = None
        """The task of `run()`."""
        self._name = name
        self._fetch = fetch
        self._timing = timing
        self._on_change = on_change
        self._is_queued = asyncio.Event()
        self._queued: tuple[FoundBy, float] = ("poll", 0.0)
        """What caused the queued fetch, and when."""
        self._running: tuple[FoundBy, float] | None = None
        """The same for the fetch that is running."""

    @property
    def is_marked(self) -> bool:
        """Whether a fetch is queued."""
        return self._is_queued.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether no fetch is running or queued."""
        return self._running is None and not self.is_marked

    @property
    def detected(self) -> Detected:
        """How the change that the running fetch has found was detected."""
        cause, since = self._running or ("poll", 0.0)
        return Detected(cause, time.monotonic() - since if cause == "notification" else None)

    def mark(self, cause: FoundBy = "notification") -> None:
        """Queue a fetch, if none is queued."""
        if not self.is_marked:
            self._queued = (cause, time.monotonic())
            self._is_queued.set()
        if self.stale_since is None:
            self.stale_since = time.time()
            self._on_change()

    def set_current(self) -> None:
        """Note that there is nothing to fetch, unless a fetch is queued."""
        self.is_loaded, self.error = True, None
        if not self.is_marked:
            self.stale_since = None
        self._on_change()

    async def fetch(self) -> None:
        """Fetch once. Raise the error if that fails."""
        cause, _ = self._running = self._queued if self.is_marked else ("poll", 0.0)
        self._is_queued.clear()
        is_complete = False
        try:
            async with asyncio.timeout(self._timing.answer):
                is_complete = await self._fetch(self)
        finally:
            self._running = None
            if not is_complete:
                self.mark(cause)
        if is_complete:
            self.set_current()

    async def run(self) -> None:
        """Fetch whenever it is due. Raise an error that is not an answer of the server: the connection is lost."""
        failures = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval and self._timing.poll_delay(self.interval)):
                    await self._is_queued.wait()
            try:
                await self.fetch()
            except (MCPError, TidingsError, ValueError) as error:  # ValueError: the answer is not valid
                if isinstance(error, MCPError) and error.code == types.CONNECTION_CLOSED:
                    raise
                failures += 1
                self.error = one_line(f"{self._name}: {error}", 200)
                self._on_change()
                await asyncio.sleep(self._timing.retry_delay(failures))
            else:
                failures = 0
                await asyncio.sleep(self._timing.min_interval)
