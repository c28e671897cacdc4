"""One streamed HTTP response that can be written to without waiting.

`Outlet` is what a lane writes to. There are two: a `Channel` on any ASGI server, here, and under uvicorn a `Parked`
connection (`tidings.http.parking`).

A channel's writer itself drives the ASGI `send()` one step. Under uvicorn it completes there and then, so that nothing
is scheduled per stream and event. A `send()` that suspends (its reader is not reading) is handed to a task, with a
deadline; until it is done the channel is busy, and whoever wants to write waits in its mailbox.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, MutableMapping
from typing import Any, Final, Protocol, TypeAlias, cast

from tidings.core.counts import Counts
from tidings.core.frames import FrameEncoder
from tidings.core.model import Notification
from tidings.core.subscriber import BUSY, Deliver
from tidings.http.disconnects import End, Guard, guard
from tidings.policy import Policy

__all__ = [
    "NOWHERE",
    "PARK",
    "UVICORN",
    "Channel",
    "Message",
    "Outlet",
    "Owner",
    "Receive",
    "Scope",
    "Send",
    "dismiss",
    "limit_silence",
]

logger = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

PARK: Final = "dev.tidings/park"
"""The extension in the scope with which our own process offers to park a stream."""

UVICORN: Final = "uvicorn.protocols.http.httptools_impl"
"""The module of the connections that `tidings.http.parking` knows; one that is not loaded serves nobody."""

_FAREWELL = 0.8
"""Seconds to read the end of a stream when the server stops: a process that is told to end must be gone within two."""


class Owner(Protocol):
    """Whose stream it is. One object and not a callback for each: there may be tens of thousands."""

    def on_free(self) -> None:
        """A write that had to wait is done."""

    def on_slow(self) -> None:
        """The reader did not read for longer than `Policy.write_deadline`; the connection is aborted next."""


class Outlet(Protocol):
    """Whole chunks only, one at a time."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be written."""

    @property
    def is_cut(self) -> bool:
        """Whether the connection was aborted, and what was still to be read is lost."""

    @property
    def is_busy(self) -> bool:
        """Whether the reader has to be waited for."""

    @property
    def is_read(self) -> bool:
        """Whether all that was written has left for the reader, as far as is known."""

    @property
    def is_gone(self) -> bool:
        """Whether the connection is closed, or is the server's again and goes on."""

    @property
    def frames_chunks(self) -> bool:
        """Whether chunks get their length here and not in the server; `FrameEncoder` can add it for many streams."""

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        """Write a chunk, unless busy or over. False if the reader has to be waited for: `on_free` is called then."""

    def teller(self, tag: bytes, press: FrameEncoder, counts: Counts) -> Deliver:
        """The shortest way for notifications. Not for use while the outlet is busy or over."""

    def abort(self) -> None:
        """Drop the connection without waiting for what is still to be read."""


class Channel:
    """An outlet that is an ASGI response."""

    __slots__ = (
        "_counts",
        "_deadline",
        "_guard",
        "_limit",
        "_loop",
        "_press",
        "_request",
        "_send",
        "_tag",
        "_task",
        "_transport",
        "is_cut",
        "is_over",
        "owner",
    )
    frames_chunks = False
    _counts: Counts
    _press: FrameEncoder
    _tag: bytes

    def __init__(self, send: Send, receive: Receive, policy: Policy, loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self._transport: asyncio.Transport | None = getattr(getattr(receive, "__self__", None), "transport", None)
        """Under uvicorn, `receive` is a method of what holds it."""
        self._limit = policy.write_deadline
        self._loop = loop
        self._request = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._guard: Guard | None = None
        self.owner: Owner | None = None
        self.is_over = False
        self.is_cut = False
        if self._transport is not None:
            limit_silence(self._transport, policy)

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def guard(self, scope: Scope, receive: Receive, end: End) -> None:
        """The response goes on as a stream: have it end when it must, which may be at once."""
        self._guard = guard(scope, receive, end)
        if self._guard is not None:
            self._guard.look_behind()

    def release(self) -> None:
        """The response ends."""
        released, self._guard = self._guard, None
        if released is not None:
            released.leave()

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        if self.is_over or self._task is not None:
            return False
        if is_last:
            self.release()
        self.is_over = is_last
        coroutine = cast(
            "Coroutine[Any, Any, None]",
            self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last}),
        )
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            return True
        except Exception as error:  # a connection that broke: its own request task hears of it and cleans up
            logger.debug("writing to a stream failed: %r", error)
            self.is_over = True
            return True
        self._task = self._loop.create_task(self._finish(coroutine, waits_for))
        # In nobody's context: whoever publishes has a trace of their own.
        self._deadline = self._loop.call_later(self._limit, self._give_up, context=contextvars.Context())
        return False

    def teller(self, tag: bytes, press: FrameEncoder, counts: Counts) -> Deliver:
        self._tag, self._press, self._counts = tag, press, counts
        return self._tell

    def _tell(self, notification: Notification) -> object:
        press = self._press
        if press.notification is not notification:
            press.turn_to(notification)
        frame = press.head + self._tag + press.tail
        self._counts.bytes += len(frame)
        return None if self.write(frame) else BUSY

    async def relay(self, send: Send, message: Message) -> None:
        """Let somebody else write a chunk of theirs, between ours."""
        await self.wait_until_free()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.release()
        deadline = self._loop.call_later(self._limit, self._give_up, context=contextvars.Context())
        try:
            await send(message)
        finally:
            deadline.cancel()

    def abort(self) -> None:
        self.is_over = self.is_cut = True
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()
        # Elsewhere, a request that ends before its response makes the server close the connection.
        elif self._request is not None and self._request is not asyncio.current_task():
            self._request.cancel()

    @property
    def is_read(self) -> bool:
        return self._task is None and (self._transport is None or not self._transport.get_write_buffer_size())

    @property
    def is_gone(self) -> bool:
        return self.is_read and (self._transport is None or not self._transport.is_closing())

    async def wait_until_free(self) -> None:
        while self._task is not None:
            await asyncio.wait({self._task})

    async def _finish(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        try:
            await _go_on(coroutine, waits_for)
        except Exception as error:  # as in write()
            logger.debug("writing to a stream failed: %r", error)
            self.is_over = True
        finally:
            self._task = None
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        if self.owner is not None:
            self.owner.on_free()

    def _give_up(self) -> None:
        self._deadline = None
        if self.owner is not None:
            self.owner.on_slow()
        self.abort()


class _Nowhere:
    """The outlet of a stream that has none, yet or any more."""

    __slots__ = ()
    is_over = is_read = is_gone = True
    is_cut = is_busy = frames_chunks = False

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        return False

    def teller(self, tag: bytes, press: FrameEncoder, counts: Counts) -> Deliver:
        return lambda notification: None

    def abort(self) -> None:
        pass


NOWHERE: Final[Outlet] = _Nowhere()


def dismiss(outlets: Iterable[Outlet], loop: asyncio.AbstractEventLoop | None) -> None:
    """The server stops: after a moment, drop the connections that are still there. Their readers have not read the last
    of it; or they have, but over TLS a connection that is closed waits for its reader to say goodbye."""
    kept = list(outlets)

    def drop() -> None:
        left = [outlet for outlet in kept if not outlet.is_gone]
        unread = sum(not outlet.is_read for outlet in left)
        if unread:
            logger.warning("%d streams were not read while the server was stopping; cutting them off", unread)
        for outlet in left:
            outlet.abort()

    if kept and loop is not None:
        loop.call_later(_FAREWELL, drop, context=contextvars.Context())


def limit_silence(transport: asyncio.Transport, policy: Policy) -> None:
    """Bound how long what was written may stay without an answer from the reader's machine. Nothing else notices one
    that vanished without a word, as long as its kernel's buffers here are not full."""
    # Longer than our own deadline, which says why. There is something to be answered at every keep-alive.
    seconds = policy.write_deadline + policy.keep_alive
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux has it
    if option is not None and connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
        except (OSError, ValueError) as error:  # gone already: its own request task hears of it
            logger.debug("a connection's time-out could not be set: %r", error)


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Await the rest of a coroutine that has been driven to its first suspension."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(sent)
    except StopIteration:
        return
    finally:
        coroutine.close()
