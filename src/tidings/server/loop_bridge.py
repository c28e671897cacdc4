"""Run work from any thread on the event loop of a server.

The hub and all transports work on the thread of one event loop. Sources change the catalog on any thread. The bridge
makes each commit, each due time of the hub and each call from elsewhere run on that thread. Before there is an event
loop, and after it is closed, everything runs immediately in the calling thread: no client is connected then.

The commits of one turn of the event loop are published together, at its end: one notification per topic. No commit
waits for a timer.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

from tidings.core.hub import Hub
from tidings.core.model import Change
from tidings.errors import UnsupportedEventLoop

__all__ = ["LoopBridge"]

logger = logging.getLogger(__name__)

Args = TypeVarTuple("Args")


class LoopBridge:
    """Connects one hub to one event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._bind_callbacks: list[Callable[[], None]] = []
        self._list_callbacks: list[Callable[[], None]] = []
        self._has_list_change = False
        self._is_scheduled = False
        """Whether `publish_queued` will be called on the event loop."""
        self._context = contextvars.copy_context()
        """The context of background work. It must not be that of a request, which may have a caller in it."""
        hub.on_timer_change = self._set_timer
        hub.catalog.publisher = self._publish

    @property
    def is_bound(self) -> bool:
        return self._loop is not None

    @property
    def is_bound_here(self) -> bool:
        """Whether the bridge is bound to the event loop that runs in this thread."""
        return self._loop is _running_loop()

    def on_bind(self, function: Callable[[], None]) -> None:
        """Call `function` each time the bridge is bound to an event loop."""
        self._bind_callbacks.append(function)

    def follow_lists(self, function: Callable[[], None]) -> None:
        """Call `function` on the event loop after changes of a list were published."""
        self._list_callbacks.append(function)

    def bind(self) -> None:
        """Bind to the running event loop, if that is another one than before."""
        if self._loop is not (loop := _running_loop()):
            self._loop, self._thread = loop, threading.get_ident()
            self.publish_queued()
            for function in self._bind_callbacks:
                function()

    def unbind(self) -> None:
        """Forget the event loop: the application is started again, perhaps on another one."""
        self._loop = None

    def call(self, function: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function on the event loop: immediately on its thread, soon from another one."""
        loop = self._loop
        if loop is None or threading.get_ident() == self._thread or loop.is_closed():
            function(*args)
        else:
            loop.call_soon_threadsafe(function, *args)

    def call_soon(self, function: Callable[[*Args], object], *args: *Args) -> None:
        """Call a function on the event loop when the present callback is over. Without an event loop, do nothing."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await a coroutine function on the event loop, from any event loop."""
        running = _running_loop()
        if self._loop is None or self._loop is running or not self._loop.is_running():
            # Others may wait for the same work, so the end of one caller must not cancel it.
            await asyncio.shield(running.create_task(work(), context=self._context.copy()))
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.run(work), self._loop))

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background until it is done or the server stops."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task in the background failed", exc_info=task.exception())

    # Commits and the hub's timer

    def _publish(self, changes: tuple[Change, ...]) -> None:
        self._hub.delivery.enqueue(changes)
        if len(changes) > 1 or not isinstance(changes[0].topic, str):
            self._has_list_change = True
        loop, is_here = self._loop, threading.get_ident() == self._thread
        if loop is None or loop.is_closed() or (is_here and not loop.is_running()):
            self.publish_queued()
        elif not self._is_scheduled:
            self._is_scheduled = True
            call_soon = loop.call_soon if is_here else loop.call_soon_threadsafe
            call_soon(self.publish_queued, context=self._context.copy())

    def publish_queued(self) -> None:
        """Publish the commits of this turn now, and not at its end. Call this on the thread of the event loop."""
        self._is_scheduled = False  # before the queue is read: a commit after this schedules another call
        self._hub.delivery.publish_queued()
        if self._has_list_change and self._loop is not None and self._loop.is_running():
            self._has_list_change = False
            for function in self._list_callbacks:
                function()

    def _set_timer(self, when: float) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self.call(self._start_timer, when)

    def _start_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        delay = max(0.0, when - time.monotonic())
        self._timer = self._loop.call_later(delay, self._tick, context=self._context.copy())

    def _tick(self) -> None:
        self._timer = None
        self._hub.tick()
        if (due := self._hub.next_due()) is not None:
            self._set_timer(due)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UnsupportedEventLoop(
            "Live() needs an event loop of asyncio, and this code runs on another one, such as trio's; start the "
            'server with asyncio.run(…) or anyio.run(…, backend="asyncio")'
        ) from None
