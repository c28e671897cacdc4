"""A streamed HTTP response that can be written to without waiting.

`ResponseStream` is the interface. It has two implementations: `AsgiStream` for any ASGI server, in this module, and
`ParkedStream` (`tidings.http.parking`) for connections of uvicorn.

`AsgiStream.write` drives the ASGI `send()` one step. Under uvicorn it completes in that step, so that nothing is
scheduled per stream and event. A `send()` that suspends, because the client does not read, continues in a task with a
deadline. Until it is done the stream is busy, and notifications wait in the subscriber's mailbox.
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
from tidings.http.disconnects import ConnectionWatcher, EndStream, find_request, mark_disconnected
from tidings.policy import Policy

__all__ = [
    "NO_STREAM",
    "AsgiStream",
    "Message",
    "Receive",
    "ResponseStream",
    "Scope",
    "Send",
    "StreamCallbacks",
    "abort_unfinished",
    "replay",
    "set_tcp_user_timeout",
]

logger = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_SHUTDOWN_GRACE = 0.8
"""Seconds that clients have to read the end of their streams when the server stops. The process must end within two
seconds."""


class StreamCallbacks(Protocol):
    """The user of a stream. One object instead of one function per event, to save memory with many streams."""

    def on_writable(self) -> None:
        """Handle the end of a write that had to wait."""

    def on_write_timeout(self) -> None:
        """Handle a client that did not read for `Policy.write_deadline`. The connection is aborted next."""


class ResponseStream(Protocol):
    """Writes whole chunks, one at a time."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be written."""

    @property
    def is_busy(self) -> bool:
        """Whether a write waits for the client to read."""

    @property
    def is_flushed(self) -> bool:
        """Whether everything was passed to the operating system, as far as is known."""

    @property
    def is_released(self) -> bool:
        """Whether the stream no longer uses the connection: it is closed, or the server uses it again."""

    @property
    def writes_chunk_sizes(self) -> bool:
        """Whether the stream itself adds the sizes of HTTP chunks. `FrameEncoder` can add them for many streams."""

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        """Write a chunk. Return False in two cases:

        * The stream is busy or closed: nothing is written.
        * The chunk waits for the client to read: `on_writable` is called when it is written.

        Return True also if the client has disconnected; the request's task cleans up then.
        """

    def deliverer(self, tag: bytes, encoder: FrameEncoder, counts: Counts) -> Deliver:
        """Return a function that writes notifications. Do not call it while the stream is busy or closed."""

    def abort(self) -> None:
        """Close the connection without waiting for unread data."""


class AsgiStream:
    """A stream that is an ASGI response."""

    __slots__ = (
        "_connection_watcher",
        "_counts",
        "_deadline",
        "_encoder",
        "_loop",
        "_pending_send",
        "_request_task",
        "_send",
        "_tag",
        "_transport",
        "_write_deadline",
        "callbacks",
        "is_aborted",
        "is_closed",
        "request",
        "write_directly",
    )
    writes_chunk_sizes = False
    _counts: Counts
    _encoder: FrameEncoder
    _tag: bytes

    def __init__(self, scope: Scope, receive: Receive, send: Send, policy: Policy) -> None:
        self._send = send
        self.request = find_request(scope, receive)
        """uvicorn's object of the request, or None on another server."""
        self._transport: asyncio.Transport | None = None
        if self.request is not None:
            mark_disconnected(self.request)
            self._transport = self.request.transport
            set_tcp_user_timeout(self.request.transport, policy)
        self._write_deadline = policy.write_deadline
        self._loop = asyncio.get_running_loop()
        self._request_task = asyncio.current_task()
        self._pending_send: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._connection_watcher: ConnectionWatcher | None = None
        self.write_directly: Callable[[bytes], bool] | None = None
        """Writes a chunk to the connection, without `send`, if that is possible now (`tidings.http.parking`)."""
        self.callbacks: StreamCallbacks | None = None
        self.is_closed = False
        self.is_aborted = False
        """Whether the connection was aborted, so that the client may have missed events."""

    @property
    def is_busy(self) -> bool:
        return self._pending_send is not None

    def watch_connection(self, end: EndStream) -> None:
        """Call `end` when the stream must end. That may be immediately."""
        if self.request is None:
            return
        mark_disconnected(self.request)
        if not self.request.transport.is_closing():
            self._connection_watcher = ConnectionWatcher(self.request, end)

    def stop_watching(self) -> None:
        watcher, self._connection_watcher = self._connection_watcher, None
        if watcher is not None:
            watcher.close()

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        if self.is_closed or self._pending_send is not None:
            return False
        if is_last:
            self.stop_watching()
        elif self.write_directly is not None and self.write_directly(chunk):
            return True
        self.is_closed = is_last
        coroutine = cast(
            "Coroutine[Any, Any, None]",
            self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last}),
        )
        try:
            awaited = coroutine.send(None)
        except StopIteration:
            return True
        except Exception as error:  # the connection broke: the request's task gets the disconnect and cleans up
            logger.debug("writing to a stream failed: %r", error)
            self.is_closed = True
            return True
        self._pending_send = self._loop.create_task(self._complete(coroutine, awaited))
        self._deadline = self._start_deadline()
        return False

    def deliverer(self, tag: bytes, encoder: FrameEncoder, counts: Counts) -> Deliver:
        self._tag, self._encoder, self._counts = tag, encoder, counts
        return self._deliver

    def _deliver(self, notification: Notification) -> object:
        encoder = self._encoder
        if encoder.notification is not notification:
            encoder.encode(notification)
        frame = encoder.head + self._tag + encoder.tail
        self._counts.bytes += len(frame)
        return None if self.write(frame) else BUSY

    async def forward(self, message: Message) -> None:
        """Send a message of the SDK after the pending write, with the same deadline."""
        await self.wait_until_writable()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.stop_watching()
        deadline = self._start_deadline()
        try:
            await self._send(message)
        finally:
            deadline.cancel()

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True
        if self._pending_send is not None:
            self._pending_send.cancel()
        if self._transport is not None:
            self._transport.abort()
        # Without a transport: the server closes the connection of a request that ends before its response.
        elif self._request_task is not None and self._request_task is not asyncio.current_task():
            self._request_task.cancel()

    @property
    def is_flushed(self) -> bool:
        return self._pending_send is None and (self._transport is None or not self._transport.get_write_buffer_size())

    @property
    def is_released(self) -> bool:
        return self.is_flushed and (self._transport is None or not self._transport.is_closing())

    async def wait_until_writable(self) -> None:
        while self._pending_send is not None:
            await asyncio.wait({self._pending_send})

    async def _complete(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        try:
            await _resume(coroutine, awaited)
        except Exception as error:  # as in write()
            logger.debug("writing to a stream failed: %r", error)
            self.is_closed = True
        finally:
            self._pending_send = None
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        if self.callbacks is not None:
            self.callbacks.on_writable()

    def _start_deadline(self) -> asyncio.TimerHandle:
        # In an empty context: that of the publisher belongs to another trace.
        return self._loop.call_later(self._write_deadline, self._on_deadline, context=contextvars.Context())

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.callbacks is not None:
            self.callbacks.on_write_timeout()
        self.abort()


class _NoStream:
    """Takes the place of a stream that is not open yet, or no longer."""

    __slots__ = ()
    is_closed = is_flushed = is_released = True
    is_busy = writes_chunk_sizes = False

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        return False

    def deliverer(self, tag: bytes, encoder: FrameEncoder, counts: Counts) -> Deliver:
        return lambda notification: None

    def abort(self) -> None:
        pass


NO_STREAM: Final[ResponseStream] = _NoStream()


def abort_unfinished(streams: Iterable[ResponseStream], loop: asyncio.AbstractEventLoop | None) -> None:
    """Abort the connections that still exist shortly after the server has begun to stop.

    Their clients have not read the end of the stream, or over TLS they have not confirmed that the connection closes.
    """
    ending = list(streams)

    def abort() -> None:
        remaining = [stream for stream in ending if not stream.is_released]
        unread = sum(not stream.is_flushed for stream in remaining)
        if unread:
            logger.warning("aborting streams whose clients did not read while the server was stopping: %d", unread)
        for stream in remaining:
            stream.abort()

    if ending and loop is not None:
        loop.call_later(_SHUTDOWN_GRACE, abort, context=contextvars.Context())


def replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a `receive` that returns the messages that were read, and then those that follow."""
    kept = iter(messages)

    async def replayed() -> Message:
        for message in kept:
            return message
        return await receive()

    return replayed


def set_tcp_user_timeout(transport: asyncio.Transport, policy: Policy) -> None:
    """Limit how long written data may stay unacknowledged by the client's machine.

    Nothing else detects a machine that disappeared, while the kernel's send buffer is not full.
    """
    # Longer than the write deadline, which logs the reason. Each keep-alive is data to be acknowledged.
    seconds = policy.write_deadline + policy.keep_alive
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # only on Linux
    if option is not None and connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
        except (OSError, ValueError) as error:  # disconnected: the request's task gets the disconnect
            logger.debug("the TCP user timeout of a connection could not be set: %r", error)


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Await the rest of a coroutine that has been driven to its first suspension."""
    try:
        while True:
            try:
                sent = yield awaited
            except BaseException as error:
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(sent)
    except StopIteration:
        return
    finally:
        coroutine.close()
