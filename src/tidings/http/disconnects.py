"""What uvicorn leaves out for a response that goes on as a stream, and is not parked.

uvicorn tells only the newest request of a connection that its client is gone; a request behind a stream waits for ever,
and nothing more is read; and a server that stops without a signal waits for every response to end by itself. So a guard
stands between the connection and its protocol for as long as the stream goes on. It hands on all that it hears, tells
the stream's own request when the client is gone, and asks the stream to end for another request or for a stop.

A request is found by its `receive`, by its task, or by the word that was left for it before the app's own middleware.
Where something around the whole app gives it another `receive` *and* another task, it is not found, and all is as
uvicorn does it; so it is on any other server.

`tests/http/test_internals_uvicorn.py` checks every part of uvicorn that this module relies on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, TypeAlias

from tidings.core.model import Reason

__all__ = ["End", "Guard", "guard", "leave_word", "tell_if_gone"]

logger = logging.getLogger(__name__)

End: TypeAlias = Callable[[Reason], None]
"""Ends a stream, as soon as it can."""

_HTTP = "uvicorn.protocols.http."

_WORD = "dev.tidings/request"
"""The extension in the scope that leads to a request, whatever runs the app."""


class Guard(asyncio.Protocol):
    """Takes the place of uvicorn's protocol, with the connection and among the server's connections."""

    __slots__ = ("_cycle", "_end", "_protocol", "_transport")

    def __init__(self, cycle: Any, end: End) -> None:
        self._cycle = cycle
        self._end: End | None = end
        self._transport = cycle.transport
        self._protocol = self._transport.get_protocol()
        _name_parts(self._protocol, cycle)
        self._protocol.connections.discard(self._protocol)
        self._protocol.connections.add(self)
        self._transport.set_protocol(self)

    def look_behind(self) -> None:
        """Have the stream end if there is another request behind it: that would wait for ever."""
        if self._end is not None and _has_another(self._protocol, self._cycle):
            logger.debug("there is a request behind a stream; ending the stream")
            self._end(Reason.REPLACED)

    def leave(self) -> None:
        """The response ends: the connection is uvicorn's again, for the next one."""
        self._end = None
        self._protocol.connections.discard(self)
        if self._transport.get_protocol() is self:
            self._protocol.connections.add(self._protocol)
            self._transport.set_protocol(self._protocol)

    # What the server calls

    def shutdown(self) -> None:
        self._protocol.shutdown()
        if self._end is not None:
            self._end(Reason.SHUTDOWN)

    # What the transport calls

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)
        self.look_behind()

    def eof_received(self) -> bool | None:
        is_kept: bool | None = self._protocol.eof_received()
        return is_kept

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end = None
        self._protocol.connections.discard(self)
        _tell(self._cycle)
        self._protocol.connection_lost(exc)


def leave_word(scope: MutableMapping[str, Any], receive: Callable[..., Any]) -> None:
    """A middleware may come that runs the app in another task."""
    cycle = getattr(receive, "__self__", None)
    if _is_cycle(cycle):
        # Weakly: it holds its scope.
        scope.setdefault("extensions", {})[_WORD] = weakref.ref(cycle)


def tell_if_gone(scope: MutableMapping[str, Any], receive: Callable[..., Any]) -> bool:
    """Tell a request whose client is gone already that it is: nothing can be sent any more, and nothing is."""
    cycle = _cycle_of(scope, receive)
    if cycle is None or not cycle.transport.is_closing():
        return False
    _tell(cycle)
    return True


def guard(scope: MutableMapping[str, Any], receive: Callable[..., Any], end: End) -> Guard | None:
    """Guard the response of the request that is being served, if its connection is one that we know."""
    if tell_if_gone(scope, receive):
        return None
    cycle = _cycle_of(scope, receive)
    try:
        return Guard(cycle, end) if cycle is not None else None
    except AttributeError as error:
        logger.debug("this version of uvicorn is another than we know (%s); streams are not guarded", error)
        return None


def _cycle_of(scope: MutableMapping[str, Any], receive: Callable[..., Any]) -> Any:
    """uvicorn's side of a request."""
    found = getattr(receive, "__self__", None)
    if _is_cycle(found):
        return found
    word = (scope.get("extensions") or {}).get(_WORD)
    if word is not None:
        return word()
    # uvicorn's task runs a method of it.
    task = asyncio.current_task()
    coroutine = task.get_coro() if task is not None else None
    found = inspect.getcoroutinelocals(coroutine).get("self") if inspect.iscoroutine(coroutine) else None
    return found if _is_cycle(found) else None


def _tell(cycle: Any) -> None:
    """As uvicorn does it for the newest request."""
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()


def _is_cycle(found: object) -> bool:
    return type(found).__name__ == "RequestResponseCycle" and type(found).__module__.startswith(_HTTP)


def _has_another(protocol: Any, cycle: Any) -> bool:
    """Whether another request, or the beginning of one, came in behind this one."""
    if hasattr(protocol, "conn"):  # with h11, which reads no further until the response is over
        return bool(protocol.conn.trailing_data[0].strip(b"\r\n"))
    return protocol.cycle is not cycle or bool(protocol.pipeline) or protocol.scope is not cycle.scope


def _name_parts(protocol: Any, cycle: Any) -> tuple[object, ...]:
    """All that a guard relies on. None of it is promised by uvicorn, and half of it would be worse than nothing."""
    return (
        (protocol.connections.discard, protocol.shutdown, protocol.data_received, protocol.eof_received),
        (protocol.pause_writing, protocol.resume_writing, protocol.connection_lost, _has_another(protocol, cycle)),
        (cycle.response_complete, cycle.disconnected, cycle.message_event.set),
    )
