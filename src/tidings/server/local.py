"""In-process subscribers that await: `async with hub.listen("prompts") as changes: async for change in changes`.

The listener takes one notification at a time; what comes meanwhile waits in its mailbox. It is unsubscribed when the
block ends, when its task is cancelled, and when nobody refers to it any more.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tidings.core.model import Change, Feature, Notification, Reason, Topic
from tidings.core.subscriber import BUSY, OnClose, Subscriber
from tidings.errors import Behind

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["Listener"]


class Listener:
    """An asynchronous iterator of Changes."""

    def __init__(
        self, hub: Hub, features: Iterable[Feature | str], uris: Iterable[str], options: Mapping[str, Any]
    ) -> None:
        self._hub = hub
        self._wanted = (tuple(features), uris, options)
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
        """End the subscription, and with it the iteration."""
        self._is_closed = True
        if self._subscriber is not None:
            self._subscriber.close()
        self._rouse()

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
            # The waiter stands before the hub is asked, so that no notification falls between the two.
            self._waiter = asyncio.get_running_loop().create_future()
            self._hub.wake(self._subscriber)
            if self._notification is None and not self._is_closed:
                await self._waiter
        return self._changes.popleft()

    def _open(self) -> None:
        if self._subscriber is None:
            self._loop = asyncio.get_running_loop()
            features, uris, options = self._wanted
            # A bound method, and a weak reference: the hub does not keep this object alive.
            on_close = partial(_closed, weakref.ref(self), options.get("on_close"))
            self._subscriber = self._hub.subscribe(
                self._deliver, *features, uris=uris, **{**options, "on_close": on_close}
            )

    def _deliver(self, notification: Notification) -> object:
        self._notification = notification
        self._rouse()
        return BUSY

    def _take(self, notification: Notification) -> None:
        self._notification = None
        self._changes.extend(notification.changes)
        if not notification.complete:
            raise Behind(
                f"{_name(notification.topic)} changed, and the journal no longer knows how; "
                f"read it again (it is at revision {notification.version.revision}) and go on"
            )

    def _rouse(self) -> None:
        """Wake the task that waits, from whatever thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_finish, self._waiter)


def _closed(listener: weakref.ref[Listener], on_close: OnClose | None, reason: Reason) -> None:
    """The hub has closed the subscriber (it expired, say): the iteration is over."""
    if (closed := listener()) is not None:
        closed._rouse()
    if on_close is not None:
        on_close(reason)


def _finish(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _name(topic: Topic) -> str:
    return topic.value if isinstance(topic, Feature) else topic
