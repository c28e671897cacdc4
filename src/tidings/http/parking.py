"""Listen streams under uvicorn: opened through the whole ASGI stack, then parked.

The lane has a witness watch the connection before it answers, sends the start of its response and the acknowledgement
as any ASGI app would, through whatever middleware there is, and then parks: the connection's protocol is swapped for an
object of a few fields, as uvicorn does for WebSockets, and the request's task, cycle, parser and protocol are let go.

In a process of ours, `ParkingProtocol` offers the witness as an extension in each request's scope (`dev.tidings/park`),
whatever wraps the request. Under anybody's `uvicorn app:app`, `watch` finds the connection by the request's `receive`.

A stream is parked only if the connection was seen to get exactly what the lane sent. Where a middleware changes or
holds back what is sent, where another request waits behind this one, and on any other server, the stream stays on plain
ASGI: nothing else differs.

`tests/http/test_internals_uvicorn.py` checks every part of uvicorn that this module relies on.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from functools import partial
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tidings.core.counts import Counts
from tidings.core.frames import FrameEncoder
from tidings.core.model import Notification
from tidings.core.subscriber import BUSY, Deliver
from tidings.http.stream import PARK, Owner, Receive

__all__ = ["Parked", "ParkedOwner", "ParkingProtocol", "Witness", "watch"]

logger = logging.getLogger(__name__)

_END: Final = b"0\r\n\r\n"
"""Of a response, after its last chunk."""


class ParkedOwner(Owner, Protocol):
    """Whose stream it is, now that no request's task stands behind it."""

    def on_lost(self) -> None:
        """The connection is gone."""

    def end(self) -> None:
        """The server stops: the stream has to end, as soon as it can."""

    def give_way(self) -> None:
        """The same, for another request behind it."""


class Parked(asyncio.Protocol):
    """An outlet that is the connection itself."""

    __slots__ = ("_connections", "_counts", "_deadline", "_limit", "_owner", "_press", "_tag", "_transport", "is_busy",
                 "is_cut", "is_gone", "is_over")  # fmt: skip
    frames_chunks = True
    _counts: Counts
    _press: FrameEncoder
    _tag: bytes

    def __init__(
        self, transport: asyncio.Transport, owner: ParkedOwner, limit: float, connections: set[Any] | None = None
    ) -> None:
        """`connections` are the server's, which it ends and waits for when it stops."""
        self._transport = transport
        self._owner = owner
        self._limit = limit
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self.is_busy = self.is_cut = self.is_gone = self.is_over = False
        if connections is not None:
            connections.add(self)

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        if self.is_over or self.is_busy:
            return False
        if is_last:
            self.is_over = True
            self._transport.write((_framed(chunk) if chunk else b"") + _END)
            self._limit_rest()
            self._transport.close()  # once all of it is read
        elif chunk:  # an empty one would be the last
            self._transport.write(_framed(chunk))
        return not self.is_busy

    def teller(self, tag: bytes, press: FrameEncoder, counts: Counts) -> Deliver:
        self._tag, self._press, self._counts = tag, press, counts
        return self._tell

    def _tell(self, notification: Notification) -> object:
        press = self._press
        if press.notification is not notification:
            press.turn_to(notification)
        self._transport.write(press.head + self._tag + press.tail)
        self._counts.bytes += press.length
        return BUSY if self.is_busy else None

    def abort(self) -> None:
        self.is_over = self.is_cut = True
        self._transport.abort()

    @property
    def is_read(self) -> bool:
        return not self.is_busy and not self._transport.get_write_buffer_size()

    # What the server calls

    def shutdown(self) -> None:
        if not self.is_over:
            self._owner.end()

    # What the transport calls

    def data_received(self, data: bytes) -> None:
        # Some clients send a line break after a body. Anything else is a request that would wait for a response which
        # never ends: its client does better to be told now.
        if data.strip(b"\r\n") and not self.is_over:
            logger.debug("a request came in behind a listen stream; ending the stream")
            self._owner.give_way()

    def pause_writing(self) -> None:
        self.is_busy = True
        self._arm()

    def resume_writing(self) -> None:
        self._rest()
        if self.is_over:
            self._limit_rest()
        self._owner.on_free()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        self.is_over = self.is_gone = True
        if self._connections is not None:
            self._connections.discard(self)
        self._owner.on_lost()

    def _limit_rest(self) -> None:
        """Nothing more will be written, so that nothing else would notice a reader who leaves the last of it, or does
        not close its own end: over TLS, both have to."""
        if self._deadline is None and not self.is_gone:
            self._arm()

    def _arm(self) -> None:
        # In nobody's context: whoever wrote last has nothing to do with who does not read.
        self._deadline = asyncio.get_running_loop().call_later(
            self._limit, self._give_up, context=contextvars.Context()
        )

    def _rest(self) -> None:
        self.is_busy = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.is_read:
            self._owner.on_slow()
        self.abort()


class ParkingProtocol(HttpToolsProtocol):
    """uvicorn's, for its option `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        # Weakly: the scope would otherwise hold the protocol that holds it, until the garbage collector comes.
        self._offer = {"watch": partial(_watch_own, weakref.ref(self))}

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        extensions[PARK] = self._offer


class Witness:
    """Stands between a request and its connection, and holds back how the response begins: it is known to be whole
    then, and goes out in one piece."""

    __slots__ = ("_cycle", "_protocol", "_transport", "_written")

    def __init__(self, protocol: HttpToolsProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = cycle.transport
        self._written: list[bytes] = []
        cycle.transport = self  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        self._written.append(data)

    def close(self) -> None:
        """The response is over already: what was held back of it goes first."""
        self.leave()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def leave(self) -> None:
        self._cycle.transport = self._transport
        # Some transports raise when their client has left.
        if self._written and not self._transport.is_closing():
            self._transport.write(b"".join(self._written))
        self._written = []

    def park(self, chunk: bytes, owner: ParkedOwner, limit: float) -> Parked | None:
        """Park, if the connection got the start of the response, then this chunk, and nothing else."""
        cycle, protocol, transport = self._cycle, self._protocol, self._transport
        arrived = self._written[1:]
        self.leave()
        if (
            arrived != [_framed(chunk)]
            or not cycle.chunked_encoding
            or cycle.response_complete
            or cycle.disconnected
            or cycle.more_body
            or _has_another(protocol, cycle)
            or protocol.flow.write_paused
            or transport.is_closing()
        ):
            return None
        protocol.flow.resume_reading()
        protocol.connections.discard(protocol)
        protocol.server_state.total_requests += 1
        parked = Parked(transport, owner, limit, protocol.connections)
        transport.set_protocol(parked)
        protocol.parser = None  # type: ignore[assignment]  # as uvicorn does: each of the two holds the other
        # The request's task finds its response complete, and whoever still asks for more of the request hears that
        # nobody is there.
        cycle.response_complete = True
        cycle.message_event.set()
        return parked


def _watch_own(reference: weakref.ref[ParkingProtocol]) -> Witness | None:
    protocol = reference()
    return _watch(protocol, protocol.cycle) if protocol is not None and protocol.cycle is not None else None


def watch(receive: Receive) -> Witness | None:
    """The witness of a request under uvicorn as it is, whose `receive` is a method of its cycle."""
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    protocol = cycle.transport.get_protocol()
    return _watch(protocol, cycle) if isinstance(protocol, HttpToolsProtocol) else None


def _framed(chunk: bytes) -> bytes:
    """A chunk as it is on the wire."""
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


def _watch(protocol: HttpToolsProtocol, cycle: RequestResponseCycle) -> Witness | None:
    try:
        _name_parts(protocol, cycle)
    except AttributeError as error:
        logger.debug("this version of uvicorn is another than we know (%s); streams are not parked", error)
        return None
    if cycle.response_started or cycle.scope["http_version"] != "1.1" or _has_another(protocol, cycle):
        return None
    return Witness(protocol, cycle)


def _name_parts(protocol: HttpToolsProtocol, cycle: RequestResponseCycle) -> tuple[object, ...]:
    """All that parking takes apart. None of it is promised by uvicorn, and half of it would be worse than nothing."""
    return (
        (protocol.parser, protocol.connections, protocol.scope, protocol.pipeline),
        (protocol.flow.resume_reading, protocol.flow.write_paused, protocol.server_state.total_requests),
        protocol.transport.set_protocol,
        (cycle.transport, cycle.scope, cycle.more_body, cycle.disconnected),
        (cycle.response_started, cycle.response_complete, cycle.chunked_encoding, cycle.message_event.set),
    )


def _has_another(protocol: HttpToolsProtocol, cycle: RequestResponseCycle) -> bool:
    """Whether another request, or the beginning of one, came in behind this one."""
    return protocol.cycle is not cycle or bool(protocol.pipeline) or protocol.scope is not cycle.scope
