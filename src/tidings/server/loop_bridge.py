"""When the hub has to look at the time: on the event loop's thread, by one timer."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

from tidings.core.hub import Hub

__all__ = ["Alarm"]


class Alarm:
    """Of one hub. May be set on any thread; before there is a loop, nothing can be due."""

    def __init__(self, context: contextvars.Context) -> None:
        self._context = context
        self._hub: Hub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._timer: asyncio.TimerHandle | None = None

    def bind(self, loop: asyncio.AbstractEventLoop, hub: Hub) -> None:
        """On the thread of a loop, which may take the place of another one."""
        self._loop, self._hub, self._thread = loop, hub, threading.get_ident()

    def ring_at(self, when: float) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.ring_at, when)
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, when - time.monotonic())
        self._timer = self._loop.call_later(delay, self._ring, context=self._context.copy())

    def _ring(self) -> None:
        self._timer = None
        if self._hub is not None:
            self._hub.tick()
            if (due := self._hub.next_due()) is not None:
                self.ring_at(due)
