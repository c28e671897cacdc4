"""In-process subscribers that await: `async with live.listen("prompts") as changes: async for change in changes`.

A listener takes one notification at a time; further topics wait in its mailbox. Its subscription ends with the block,
when its task is cancelled, and when the listener is garbage-collected.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from tidings.core.hub import Hub
from tidings.core.model import Change, Feature, Notification, Reason, Topic
from tidings.core.subscriber import BUSY, OnClose, Subscriber
from tidings.errors import ChangesMissed

__all__ = ["Listener", "listen"]


def listen(hub: Hub, *features: Feature | str, uris: Iterable[str] = (), **options: Any) -> Listener:
    """Return an asynchronous iterator of the changes of features, URIs and patterns.

    `options` are those of `hub.subscribe()`."""
    return Listener(hub, features, uris, options)


class Listener:
    """An asynchronous iterator of changes."""

    def __init__(
        self, hub: Hub, features: Iterable[Feature | str], uris: Iterable[str], options: Mapping[str, Any]
    ) -> None:
        self._hub = hub
        self._requested = (tuple(features), uris, options)
        self._subscriber: Subscriber | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._notification: Notification | None = None
        self._changes: deque[Change] = deque()
        self._is_closed = False

    async def __aenter__(self) -> Listener:
        self._open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the subscription and the iteration."""
        self._is_closed = True
        if self._subscriber is not None:
            self._subscriber.close()
        self._wake()

    def __aiter__(self) -> Listener:
        self._open()
        return self

    async def __anext__(self) -> Change:
        self._open()
        assert self._subscriber is not None
        while not self._changes:
            if self._notification is not None:
                self._take(self._notification)
                continue
            if self._is_closed or self._subscriber.is_closed:
                raise StopAsyncIteration
            # Before `wake`, which may deliver the next notification immediately.
            self._waiter = asyncio.get_running_loop().create_future()
            self._hub.wake(self._subscriber)
            if self._notification is None and not self._is_closed:
                await self._waiter
        return self._changes.popleft()

    def _open(self) -> None:
        if self._subscriber is None:
            self._loop = asyncio.get_running_loop()
            features, uris, options = self._requested
            # Weak references, so that the hub does not keep this object alive.
            weak = weakref.ref(self)
            options = {
                "label": type(self).__name__,
                **options,
                "on_close": partial(_closed, weak, options.get("on_close")),
            }
            self._subscriber = self._hub.subscribe(partial(_deliver, weak), *features, uris=uris, **options)
            weakref.finalize(self, _collected, self._loop, self._subscriber).atexit = False

    def _take(self, notification: Notification) -> None:
        self._notification = None
        self._changes.extend(notification.changes)
        if not notification.complete:
            raise ChangesMissed(
                f"{_name(notification.topic)} changed, and the journal no longer has the changes; "
                f"read it again (it is at revision {notification.version.revision}) and continue"
            )

    def _wake(self) -> None:
        """Wake the task that waits, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_finish, self._waiter)


def _deliver(listener: weakref.ref[Listener], notification: Notification) -> object:
    if (receiver := listener()) is not None:
        receiver._notification = notification
        receiver._wake()
    return BUSY


def _collected(loop: asyncio.AbstractEventLoop, subscriber: Subscriber) -> None:
    """Close the subscriber of a listener that was garbage-collected, which can happen anywhere: so not at once."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(subscriber.close, Reason.COLLECTED)


def _closed(listener: weakref.ref[Listener], on_close: OnClose | None, reason: Reason) -> None:
    """End the iteration, because the hub has closed the subscriber: it has expired, for example."""
    if (closed := listener()) is not None:
        closed._wake()
    if on_close is not None:
        on_close(reason)


def _finish(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _name(topic: Topic) -> str:
    return topic.value if isinstance(topic, Feature) else topic
