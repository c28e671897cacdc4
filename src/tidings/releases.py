"""When what is held is told: on the event loop's thread, once it is written down, or in time if it is not."""

from __future__ import annotations

import asyncio
import contextvars
import threading

from tidings.hub import Hub

__all__ = ["Releases"]


class Releases:
    """Of one hub. May be asked on any thread, and has one timer at most."""

    def __init__(self, hub: Hub, context: contextvars.Context) -> None:
        self._hub = hub
        self._context = context
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._timer: asyncio.TimerHandle | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the thread of a loop that takes the place of another one."""
        self.stop()
        self._loop, self._thread = loop, threading.get_ident()
        self.later()

    def soon(self) -> None:
        """A batch was written, or could not be."""
        if self._hub.hold and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hub.release)

    def later(self) -> None:
        """Something is held."""
        if self._loop is None or self._loop.is_closed():
            return
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.later)
        elif self._timer is None and self._hub.hold:
            delay = self._hub.hold.patience(self._hub._clock())
            self._timer = self._loop.call_later(delay, self._release, context=self._context.copy())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        self._timer = None
        self._hub.release()
