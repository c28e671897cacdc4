"""Streams that are uvicorn connections: opened through the whole ASGI stack, then parked.

A listen stream is opened in three steps:

1. `buffer_response` buffers what uvicorn writes for the request.
2. The app sends the start of the response and the acknowledgement as any ASGI app does, through every middleware.
3. `BufferedTransport.park` replaces the connection's protocol by a `ParkedStream`, as uvicorn does for WebSockets. The
   request's task, parser and protocol are released.

A stream is parked only if the connection got exactly what the app sent. It stays on plain ASGI if a middleware changes
or delays what is sent, if another request waits behind this one, and on other servers.

A legacy stream remains a response of the SDK. If uvicorn serves the app itself and the app has no middleware,
`direct_writer` writes the events of Tidings to the connection, which takes a third less CPU than `send()`.

`disconnects.UVICORN_NAMES` has the parts of uvicorn that this module uses.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from tidings.core.counts import Counts
from tidings.core.frames import FrameEncoder
from tidings.core.model import Notification, Reason
from tidings.core.subscriber import BUSY, Deliver
from tidings.http.disconnects import has_next_request
from tidings.http.stream import Scope, StreamCallbacks

__all__ = ["BufferedTransport", "ParkedCallbacks", "ParkedStream", "buffer_response", "direct_writer"]

logger = logging.getLogger(__name__)

_HTTPTOOLS: Final = "uvicorn.protocols.http.httptools_impl"
"""The module of the supported protocol."""

_LAST_CHUNK: Final = b"0\r\n\r\n"


class ParkedCallbacks(StreamCallbacks, Protocol):
    """The user of a parked stream, which no longer has a request's task."""

    def on_disconnect(self) -> None:
        """Handle the end of the connection."""

    def end(self, reason: Reason) -> None:
        """End the stream as soon as possible: the server stops, or another request came in behind it."""


class ParkedStream(asyncio.Protocol):
    """A stream that is the connection itself.

    It is also the function that `deliverer` returns: a bound method would take 64 bytes per stream.
    """

    __slots__ = ("_callbacks", "_connections", "_counts", "_deadline", "_encoder", "_tag", "_transport",
                 "_write_deadline", "is_busy", "is_closed", "is_released")  # fmt: skip
    writes_chunk_sizes = True
    _counts: Counts
    _encoder: FrameEncoder
    _tag: bytes

    def __init__(
        self, transport: asyncio.Transport, callbacks: ParkedCallbacks, write_deadline: float, connections: set[Any]
    ) -> None:
        """`connections` are the server's, which it closes and waits for when it stops."""
        self._transport = transport
        self._callbacks = callbacks
        self._write_deadline = write_deadline
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self.is_busy = self.is_closed = self.is_released = False
        connections.add(self)

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        if self.is_closed or self.is_busy:
            return False
        if is_last:
            self.is_closed = True
            self._transport.write((_encode_chunk(chunk) if chunk else b"") + _LAST_CHUNK)
            self._limit_closing()
            self._transport.close()  # after everything is written
        elif chunk:  # an empty one would be the last
            self._transport.write(_encode_chunk(chunk))
        return not self.is_busy

    def deliverer(self, tag: bytes, encoder: FrameEncoder, counts: Counts) -> Deliver:
        self._tag, self._encoder, self._counts = tag, encoder, counts
        return self

    def __call__(self, notification: Notification) -> object:
        encoder = self._encoder
        if encoder.notification is not notification:
            encoder.encode(notification)
        self._transport.write(encoder.head + self._tag + encoder.tail)
        self._counts.bytes += encoder.length
        return BUSY if self.is_busy else None

    def abort(self) -> None:
        self.is_closed = True
        self._transport.abort()

    @property
    def is_flushed(self) -> bool:
        return not self.is_busy and not self._transport.get_write_buffer_size()

    # Called by the server

    def shutdown(self) -> None:
        if not self.is_closed:
            self._callbacks.end(Reason.SHUTDOWN)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        # Some clients send a line break after a body. Anything else is a request that would wait forever.
        if data.strip(b"\r\n") and not self.is_closed:
            logger.debug("a request came in behind a listen stream; ending the stream")
            self._callbacks.end(Reason.REPLACED)

    def pause_writing(self) -> None:
        self.is_busy = True
        self._start_deadline()

    def resume_writing(self) -> None:
        self._cancel_deadline()
        if self.is_closed:
            self._limit_closing()
        self._callbacks.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self.is_closed = self.is_released = True
        self._connections.discard(self)
        self._callbacks.on_disconnect()

    def _limit_closing(self) -> None:
        """Limit how long the client may take to read the end of the stream and, over TLS, to close its side."""
        if self._deadline is None and not self.is_released:
            self._start_deadline()

    def _start_deadline(self) -> None:
        # In an empty context: that of the publisher belongs to another trace.
        self._deadline = asyncio.get_running_loop().call_later(
            self._write_deadline, self._on_deadline, context=contextvars.Context()
        )

    def _cancel_deadline(self) -> None:
        self.is_busy = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if not self.is_flushed:
            self._callbacks.on_write_timeout()
        self.abort()


class BufferedTransport:
    """Takes the place of the transport in uvicorn's request, and buffers the beginning of its response.

    So `park` can compare it with what the app sent, and `flush` writes it in one call.
    """

    __slots__ = ("_protocol", "_request", "_transport", "_written")

    def __init__(self, request: Any, protocol: Any) -> None:
        self._request = request
        self._protocol = protocol
        self._transport: asyncio.Transport = request.transport
        self._written: list[bytes] = []
        request.transport = self

    def write(self, data: bytes) -> None:
        self._written.append(data)

    def close(self) -> None:
        """Write what is buffered, and close: the response is complete already."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def flush(self) -> None:
        """Write what is buffered, and give the transport back to the request."""
        self._request.transport = self._transport
        # Some transports raise when their client has disconnected.
        if self._written and not self._transport.is_closing():
            self._transport.write(b"".join(self._written))
        self._written = []

    def park(self, chunk: bytes, callbacks: ParkedCallbacks, write_deadline: float) -> ParkedStream | None:
        """Park the stream if the connection got the start of the response, then this chunk, and nothing else."""
        request, protocol, transport = self._request, self._protocol, self._transport
        written = self._written[1:]
        self.flush()
        if (
            written != [_encode_chunk(chunk)]
            or not request.chunked_encoding
            or request.response_complete
            or request.disconnected
            or request.more_body
            or has_next_request(protocol, request)
            or protocol.flow.write_paused
            or transport.is_closing()
        ):
            return None
        protocol.flow.resume_reading()
        protocol.connections.discard(protocol)
        protocol.server_state.total_requests += 1
        parked = ParkedStream(transport, callbacks, write_deadline, protocol.connections)
        transport.set_protocol(parked)
        protocol.parser = None  # as uvicorn does: protocol and parser reference each other
        # The request's task finds its response complete. A middleware that still receives gets a disconnect.
        request.response_complete = True
        request.message_event.set()
        return parked


def buffer_response(scope: Scope, request: Any) -> BufferedTransport | None:
    """Buffer the response of uvicorn's request if it is served with httptools and has not begun."""
    if type(request).__module__ != _HTTPTOOLS or request.transport.is_closing():
        return None
    protocol = request.transport.get_protocol()
    if request.response_started or scope["http_version"] != "1.1" or has_next_request(protocol, request):
        return None
    return BufferedTransport(request, protocol)


def direct_writer(scope: Scope, request: Any) -> Callable[[bytes], bool] | None:
    """Return a function that writes a chunk of a response that has started, without the ASGI `send()`.

    Return None if a middleware would see the chunks. The function returns False if a chunk has to be sent the usual
    way.
    """
    if type(request).__module__ != _HTTPTOOLS or request.transport.is_closing():
        return None
    app: Any = request.transport.get_protocol().app
    if type(app).__name__ == "ProxyHeadersMiddleware":  # uvicorn's own, which passes `send` on
        app = app.app
    is_direct = request.chunked_encoding and app is scope.get("app") and not scope["app"].user_middleware
    return partial(_write_chunk, request) if is_direct else None


def _write_chunk(request: Any, chunk: bytes) -> bool:
    if not chunk or request.flow.write_paused or request.disconnected or request.response_complete:
        return False
    request.transport.write(_encode_chunk(chunk))
    return True


def _encode_chunk(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)
