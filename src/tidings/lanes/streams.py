"""The connections of our own process: lists answered and listen streams opened there, and all streams parked.

A stream is opened at its connection, without an ASGI request, where a list would be answered there (`QuickAnswers`),
and its request came alone; one of which nothing is honoured ends there too. Every check is the one of the whole way
(`Front`, `ListenLane`): what the headers and the body say, the limits, the server's authorization. Whatever has to be
waited for, and every error, goes the whole way. Most streams come on a connection of their own, so that uvicorn's
protocol is only made for one that begins with something else (`Doorstep`).
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from tidings.lanes.answers import FORWARDED, Door, QuickAnswers, known_door
from tidings.lanes.channel import limit_silence
from tidings.lanes.listen import STREAM_HEADERS, ListenStream, Park, Refuse
from tidings.lanes.parked import END, Parked, ParkingProtocol, framed, take_over
from tidings.lanes.verdicts import LISTEN, Claim
from tidings.policy import Policy

__all__ = ["Connection", "Doorstep"]

_HEAD = b"".join(b"%b: %b\r\n" % header for header in [*STREAM_HEADERS, (b"transfer-encoding", b"chunked")])

logger = logging.getLogger(__name__)
_access = logging.getLogger("uvicorn.access")


class Connection(QuickAnswers, ParkingProtocol):
    """uvicorn's own, and what is quicker."""

    has_tried = False
    """Whether the request that has just come could not be opened here: nobody is asked twice whether it may be."""

    def data_received(self, data: bytes) -> None:
        door = self._door
        if door is not None and self._held is None and self._is_between and data.startswith(door.line):
            found = door.recognize_stream(data)
            if found is not None and self._is_free() and self._open(door, *found):
                self.has_tried = False
                return
        super().data_received(data)
        self.has_tried = False

    def _may_settle(self, claim: Claim, headers: set[bytes]) -> bool:
        # Who is behind a proxy is counted by the address that the proxy names, which is for uvicorn to find out.
        return super()._may_settle(claim, headers) or (claim.method == LISTEN and not headers & FORWARDED)

    def _settle(self, door: Door, claim: Claim, body: bytes) -> bool:
        if claim.method != LISTEN:
            return super()._settle(door, claim, body)
        is_alone = self._data is not None and self._data.partition(b"\r\n\r\n")[2] == body
        return is_alone and self._open(door, claim, body)

    def _open(self, door: Door, claim: Claim, body: bytes) -> bool:
        if self.has_tried:
            return False
        self.has_tried = True
        return _open(
            door, claim, body, self.transport, self.client, partial(self._begin, door), partial(self.refuse, door)
        )

    def refuse(self, door: Door, acknowledged: bytes, result: bytes) -> None:
        self._complete(door, _begun(door, self.server_state, acknowledged) + framed(result) + END)

    def _begin(self, door: Door, acknowledged: bytes, stream: ListenStream, policy: Policy) -> Parked:
        self._log_access(door)
        self._unset_keepalive_if_required()
        # Before it is written to, since it hears of it if the reader has to be waited for.
        parked = take_over(self, stream, policy.write_deadline)
        limit_silence(self.transport, policy)
        self.transport.write(_begun(door, self.server_state, acknowledged))
        return parked


class Doorstep(asyncio.Protocol):
    """A connection of which nothing has come yet. For uvicorn's option `http`."""

    __slots__ = ("_app_state", "_config", "_loop", "_state", "_transport")

    connection: ClassVar[type[Connection]] = Connection
    _transport: asyncio.Transport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._loop = _loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self._transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # all that is asked of it is here

    def data_received(self, data: bytes) -> None:
        door, has_tried = known_door(self._config), False
        if door is not None and not _access.isEnabledFor(logging.INFO) and not self._transport.is_closing():
            found = door.recognize_stream(data)
            if found is not None:
                has_tried = True
                transport = self._transport
                begin, refuse = partial(self._begin, door), partial(self._refuse, door)
                if _open(door, *found, transport, get_remote_addr(transport), begin, refuse):
                    return
        connection = self._step_in()
        connection.has_tried = has_tried
        connection.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)

    def shutdown(self) -> None:
        """The server stops."""
        self._transport.close()

    def _step_in(self) -> Connection:
        connection = self.connection(self._config, self._state, self._app_state, self._loop)
        self._state.connections.discard(self)
        connection.connection_made(self._transport)
        self._transport.set_protocol(connection)
        return connection

    def _begin(self, door: Door, acknowledged: bytes, stream: ListenStream, policy: Policy) -> Parked:
        self._state.connections.discard(self)
        self._state.total_requests += 1
        parked = Parked(self._transport, stream, policy.write_deadline, self._state.connections)
        self._transport.set_protocol(parked)
        limit_silence(self._transport, policy)
        self._transport.write(_begun(door, self._state, acknowledged))
        return parked

    def _refuse(self, door: Door, acknowledged: bytes, result: bytes) -> None:
        self._step_in().refuse(door, acknowledged, result)


def _open(
    door: Door,
    claim: Claim,
    body: bytes,
    transport: asyncio.Transport,
    client: tuple[str, int] | None,
    park: Park,
    refuse: Refuse,
) -> bool:
    try:
        # In a context of its own, as a request's task is: what is set in there is of this request alone.
        return copy_context().run(door.front.open_at_once, claim, body, client[0] if client else None, park, refuse)
    except Exception:
        logger.exception("a listen stream could not be opened at its connection")
        if not isinstance(transport.get_protocol(), Parked):
            return False  # the whole way has an answer to everything
        transport.abort()
        return True


def _begun(door: Door, state: ServerState, event: bytes) -> bytes:
    """A response with its first event, as uvicorn would write it."""
    return b"%b%b\r\n%b" % (door.start(state.default_headers), _HEAD, framed(event))
