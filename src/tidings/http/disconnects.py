"""Find the connection of a request under uvicorn, and detect when its stream must end.

uvicorn has three gaps for a response that continues as a stream:

* It reports a disconnect only to the newest request of a connection.
* A request behind the stream waits forever, and nothing more is read.
* A server that stops without a signal waits until every response ends by itself.

So `ConnectionWatcher` is between the connection and uvicorn's protocol while the stream is open. It forwards every
call, reports the disconnect to the stream's own request, and ends the stream for another request or for a shutdown.

A request is found by its `receive`, by its task, or by the reference that `RequestReference` puts into the scope before
the app's own middleware runs. If something around the whole app replaces both `receive` and the task, the request is
not found, and the gaps remain. Other servers are left alone.

`UVICORN_NAMES` has the parts of uvicorn that this module and `tidings.http.parking` use. A version that lacks one is
refused by `live.run()` and `tidings serve`; if the user runs uvicorn, its connections are left alone.
`tests/http/test_internals_uvicorn.py` uses each part.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, MutableMapping
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeAlias

from tidings.core.model import Reason
from tidings.dependencies import Names, check_names, missing_name_error

__all__ = [
    "UVICORN_NAMES",
    "ConnectionWatcher",
    "EndStream",
    "RequestReference",
    "check_uvicorn",
    "find_request",
    "has_next_request",
    "mark_disconnected",
]

logger = logging.getLogger(__name__)

EndStream: TypeAlias = Callable[[Reason], None]
"""Ends a stream as soon as possible."""

_UVICORN = "uvicorn.protocols.http."
_REQUEST = [
    "disconnected",
    "flow",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
    "transport",
]
_PROTOCOL = [
    "app",
    "connection_lost",
    "connections",
    "data_received",
    "eof_received",
    "flow",
    "pause_writing",
    "resume_writing",
    "server_state",
    "shutdown",
]
UVICORN_NAMES: Final[Names] = {
    f"{_UVICORN}h11_impl:H11Protocol": [*_PROTOCOL, "conn"],
    f"{_UVICORN}h11_impl:RequestResponseCycle": _REQUEST,
    f"{_UVICORN}httptools_impl:HttpToolsProtocol": [*_PROTOCOL, "cycle", "parser", "pipeline", "scope"],
    f"{_UVICORN}httptools_impl:RequestResponseCycle": [*_REQUEST, "chunked_encoding"],
    f"{_UVICORN}flow_control:FlowControl": ["resume_reading", "write_paused"],
    "uvicorn.server:ServerState": ["total_requests"],
}

_EXTENSION = "dev.tidings/request"
"""The extension in the scope with the reference to uvicorn's request."""


def check_uvicorn() -> None:
    """Raise `UnsupportedVersion` if uvicorn lacks a part that Tidings uses. Only loaded protocols are checked."""
    check_names(
        "uvicorn", {owner: UVICORN_NAMES[owner] for owner in UVICORN_NAMES if owner.split(":")[0] in sys.modules}
    )


class RequestReference:
    """ASGI middleware that puts a reference to uvicorn's request into the scope.

    The middleware inside it may replace `receive` and run the app in another task.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Any) -> None:
        if scope["type"] == "http":
            request = getattr(receive, "__self__", None)
            if _is_request(request):
                # A weak reference, because the request has the scope.
                scope.setdefault("extensions", {})[_EXTENSION] = weakref.ref(request)
        await self._app(scope, receive, send)


def find_request(scope: MutableMapping[str, Any], receive: Callable[..., Any]) -> Any:
    """Return uvicorn's `RequestResponseCycle` of this request; None on other servers, and for an unsupported version
    of uvicorn."""
    request: Any = getattr(receive, "__self__", None)
    if not _is_request(request) and (reference := (scope.get("extensions") or {}).get(_EXTENSION)) is not None:
        request = reference()
    if not _is_request(request):
        # uvicorn's task runs a method of the request.
        task = asyncio.current_task()
        coroutine = task.get_coro() if task is not None else None
        request = inspect.getcoroutinelocals(coroutine).get("self") if inspect.iscoroutine(coroutine) else None
    if not _is_request(request):
        return None
    try:
        _check_attributes(request, request.transport.get_protocol())
    except AttributeError as error:
        kind = type(error.obj)
        if kind.__module__.startswith("uvicorn."):  # otherwise it is the user's own protocol
            _warn_once(f"{kind.__module__}:{kind.__name__}.{error.name}")
        return None
    return request


class ConnectionWatcher(asyncio.Protocol):
    """Takes the place of uvicorn's protocol, in the transport and among the server's connections."""

    __slots__ = ("_end", "_protocol", "_request", "_transport")

    def __init__(self, request: Any, end: EndStream) -> None:
        self._request = request
        self._end: EndStream | None = end
        self._transport = request.transport
        self._protocol = self._transport.get_protocol()
        self._protocol.connections.discard(self._protocol)
        self._protocol.connections.add(self)
        self._transport.set_protocol(self)
        self._check_next_request()

    def _check_next_request(self) -> None:
        """End the stream if another request came in behind it, which would wait forever."""
        if self._end is not None and has_next_request(self._protocol, self._request):
            logger.debug("a request came in behind a stream; ending the stream")
            self._end(Reason.REPLACED)

    def close(self) -> None:
        """Give the connection back to uvicorn."""
        self._end = None
        self._protocol.connections.discard(self)
        if self._transport.get_protocol() is self:
            self._protocol.connections.add(self._protocol)
            self._transport.set_protocol(self._protocol)

    # Called by the server

    def shutdown(self) -> None:
        self._protocol.shutdown()
        if self._end is not None:
            self._end(Reason.SHUTDOWN)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)
        self._check_next_request()

    def eof_received(self) -> bool | None:
        keeps_open: bool | None = self._protocol.eof_received()
        return keeps_open

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end = None
        self._protocol.connections.discard(self)
        _set_disconnected(self._request)
        self._protocol.connection_lost(exc)


def mark_disconnected(request: Any) -> None:
    """Mark a request whose connection is closed as disconnected: uvicorn then ignores what is sent."""
    if request.transport.is_closing():
        _set_disconnected(request)


def _set_disconnected(request: Any) -> None:
    """Do what uvicorn does for the newest request."""
    if not request.response_complete:
        request.disconnected = True
    request.message_event.set()


def _is_request(found: object) -> bool:
    return type(found).__name__ == "RequestResponseCycle" and type(found).__module__.startswith(_UVICORN)


def has_next_request(protocol: Any, request: Any) -> bool:
    """Return whether another request, or the beginning of one, came in behind this one."""
    if hasattr(protocol, "conn"):  # h11, which does not parse further until the response is complete
        return bool(protocol.conn.trailing_data[0].strip(b"\r\n"))
    return protocol.cycle is not request or bool(protocol.pipeline) or protocol.scope is not request.scope


def _check_attributes(request: Any, protocol: Any) -> None:
    """Raise AttributeError if these objects lack a part that Tidings uses."""
    of_request, of_protocol, of_flow, of_state = _getters(type(request).__module__)
    of_request(request)
    of_flow(request.flow)
    if protocol is not None:  # otherwise the connection is closed
        of_protocol(protocol)
        of_state(protocol.server_state)


@cache
def _getters(module: str) -> list[attrgetter[Any]]:
    """Return functions that get all used attributes of a request, a protocol, the flow control and the state."""
    is_h11 = module.endswith("h11_impl")  # treat any other uvicorn module as httptools
    kinds = (
        f"{_UVICORN}h11_impl:RequestResponseCycle" if is_h11 else f"{_UVICORN}httptools_impl:RequestResponseCycle",
        f"{_UVICORN}h11_impl:H11Protocol" if is_h11 else f"{_UVICORN}httptools_impl:HttpToolsProtocol",
        f"{_UVICORN}flow_control:FlowControl",
        "uvicorn.server:ServerState",
    )
    return [attrgetter(*UVICORN_NAMES[kind]) for kind in kinds]


@cache
def _warn_once(name: str) -> None:
    logger.warning("the connections of uvicorn are left alone: %s", missing_name_error("uvicorn", name))
