"""Streams under uvicorn that are not parked end when their client disconnects, when it sends another request on the
same connection, and when the server stops without a signal. With each of uvicorn's parsers, on both event loops.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import pytest

from tests.support.faults.wire import get_request, listen_request, modern_request, open_session
from tests.support.loops import anyio_backend
from tests.support.streams import (
    NEXT_REQUEST,
    BodyMiddleware,
    QueueMiddleware,
    Server,
    check_change,
    check_ended,
    check_notified,
    connected,
    read_event,
    read_rest,
    serving,
)
from tests.support.waiting import DEADLINE, until
from tidings.http.disconnects import ConnectionWatcher
from tidings.http.stream import AsgiStream

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio


class ReceiveMiddleware:
    """Gives the app another `receive`, and changes the body, so that no stream is parked."""

    def __init__(self, app: Any) -> None:
        self._app = BodyMiddleware(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def wrapped() -> Any:
            return await receive()

        await self._app(scope, wrapped if scope["type"] == "http" else receive, send)


@pytest.fixture(params=["httptools", "h11"])
def http(request: pytest.FixtureRequest) -> Any:
    return request.param


every_middleware = pytest.mark.parametrize("middleware", [BodyMiddleware, ReceiveMiddleware, QueueMiddleware])


async def check_nothing_is_left(server: Server) -> None:
    live, state = server.live, server.uvicorn.server_state
    await until(lambda: not state.connections and not state.tasks)
    assert (live.subscriptions.limits.count, len(live.listen_streams), len(live.legacy_streams)) == (0, 0, 0)


@every_middleware
async def test_later_request_ends_the_stream_and_gets_its_response(middleware: Any, http: Any) -> None:
    async with serving(middleware, http=http) as server:
        async with connected(server, listen_request(1)) as (stream, writer):
            await check_notified(server, stream)
            assert server.stream_types == [AsgiStream]
            writer.write(NEXT_REQUEST)
            await check_ended(stream, 1)
            async with asyncio.timeout(DEADLINE):
                assert (await stream._reader.readline()).startswith(b"HTTP/1.1 200")
        await check_nothing_is_left(server)


@every_middleware
async def test_disconnect_with_an_unread_stream_and_a_waiting_request_is_detected(middleware: Any, http: Any) -> None:
    """uvicorn reports the disconnect only to the newest request, and the stream can't end before it."""
    async with serving(middleware, http=http) as server:
        async with connected(server, listen_request(1)) as (stream, writer):
            await read_event(stream)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            (response,) = server.streams
            versions = itertools.count(1)
            await until(
                lambda: response.is_busy or server.live.listen_streams.slow,
                action=lambda: server.change(f"{next(versions)}" * 100_000),
            )
            writer.write(NEXT_REQUEST)
            await writer.drain()
            writer.transport.abort()
        await check_nothing_is_left(server)


class HoldingMiddleware:
    """Passes requests on only when the test allows it."""

    def __init__(self, app: Any, may_continue: asyncio.Event, errors: list[Exception]) -> None:
        self._app = app
        self._may_continue = may_continue
        self._errors = errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._may_continue.wait()
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            self._errors.append(error)
            raise


@pytest.mark.parametrize("next_request", [b"", NEXT_REQUEST], ids=["alone", "with another request"])
async def test_disconnect_before_the_stream_opens_is_no_error(next_request: bytes, http: Any) -> None:
    errors: list[Exception] = []
    may_continue = asyncio.Event()
    async with serving(partial(HoldingMiddleware, may_continue=may_continue, errors=errors), http=http) as server:
        state = server.uvicorn.server_state
        _, writer = await asyncio.open_connection(*server.address[:2])
        writer.write(listen_request(1) + next_request)
        await until(lambda: state.tasks)
        connection: Any = next(iter(state.connections))
        writer.transport.abort()
        connection.flow.resume_reading()  # as a middleware that still reads the request does
        await until(lambda: not state.connections)
        may_continue.set()
        await check_nothing_is_left(server)
        assert not errors


async def test_later_request_ends_a_legacy_stream_and_the_session_can_open_another(http: Any) -> None:
    async with serving(http=http) as server:
        session_id = await open_session(server.address[1])
        async with connected(server, get_request(session_id)) as (stream, writer):
            await check_change(server, stream, "new")
            writer.write(NEXT_REQUEST)
            assert await read_rest(stream) == []
            async with asyncio.timeout(DEADLINE):
                assert (await stream._reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: not len(server.live.legacy_streams))
        async with connected(server, get_request(session_id)) as (stream, _):
            await check_change(server, stream, "newer")


@every_middleware
async def test_server_that_stops_without_a_signal_ends_every_stream(middleware: Any, http: Any) -> None:
    async with serving(middleware, http=http, timeout_graceful_shutdown=DEADLINE) as server:
        session_id = await open_session(server.address[1])
        async with (
            connected(server, listen_request("mine")) as (stream, _),
            connected(server, get_request(session_id)) as (legacy, _),
        ):
            await read_event(stream)
            assert server.stream_types == [AsgiStream]
            await until(lambda: len(server.live.legacy_streams))
            server.uvicorn.should_exit = True
            await check_ended(stream, "mine")
            assert await read_rest(legacy) == []
            assert legacy.is_terminated


async def test_watched_connection_counts_once_and_is_given_back_after_the_stream(http: Any) -> None:
    async with serving(QueueMiddleware, http=http) as server, connected(server, listen_request(1)) as (stream, writer):
        connections: Any = server.uvicorn.server_state.connections
        await read_event(stream)
        assert [type(each) for each in connections] == [ConnectionWatcher]
        writer.write(NEXT_REQUEST)
        await read_rest(stream)
        assert [type(each) for each in connections] != [ConnectionWatcher]
        assert len(connections) == 1
        async with asyncio.timeout(DEADLINE):
            await stream._reader.readuntil(b'"tools"')
            writer.write(modern_request("tools/list", 3))
            await stream._reader.readuntil(b'"tools"')
