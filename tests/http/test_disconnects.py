"""Streams under uvicorn that stay responses: they end when their client leaves, when it asks for something else on the
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
    ANOTHER,
    Capitals,
    Delayed,
    Server,
    check_told,
    connected,
    event,
    rest,
    serving,
)
from tests.support.waiting import DEADLINE, until
from tidings.http.app import _protocol
from tidings.http.disconnects import Guard
from tidings.http.stream import Channel

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio


class Wrapped:
    """A middleware that gives the app another `receive`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            return await receive()

        # And another `send`, so that no stream is parked.
        await Capitals(self._app)(scope, received if scope["type"] == "http" else receive, send)


@pytest.fixture(params=["ours", "httptools", "h11"])
def http(request: pytest.FixtureRequest) -> Any:
    return _protocol() if request.param == "ours" else request.param


async def check_nothing_is_left(server: Server) -> None:
    live, state = server.live, server.uvicorn.server_state
    await until(lambda: not state.connections and not state.tasks)
    assert (live.gate.count, len(live.listen), len(live.splice)) == (0, 0, 0)


@pytest.mark.parametrize("middleware", [Capitals, Wrapped, Delayed])
async def test_a_request_that_comes_in_later_ends_the_stream_and_is_answered(middleware: Any, http: Any) -> None:
    async with serving(middleware, http=http) as server:
        async with connected(server, listen_request(1)) as (stream, writer):
            await check_told(server, stream)
            assert [type(each) for each in server.outlets] == [Channel]
            writer.write(ANOTHER)
            assert [told["id"] for told in await rest(stream)] == [1]
            async with asyncio.timeout(DEADLINE):
                assert (await stream._reader.readline()).startswith(b"HTTP/1.1 200")
        await check_nothing_is_left(server)


@pytest.mark.parametrize("middleware", [Capitals, Wrapped, Delayed])
async def test_a_client_that_leaves_with_a_request_behind_a_stream_that_it_does_not_read_is_gone(
    middleware: Any, http: Any
) -> None:
    """uvicorn tells the newest request alone, and this one could not end before."""
    async with serving(middleware, http=http) as server:
        async with connected(server, listen_request(1)) as (stream, writer):
            await event(stream)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            (outlet,) = server.outlets
            editions = itertools.count(1)
            await until(
                lambda: outlet.is_busy or server.live.listen.slow,
                doing=lambda: server.change(f"{next(editions)}" * 100_000),
            )
            writer.write(ANOTHER)
            await writer.drain()
            writer.transport.abort()
        await check_nothing_is_left(server)


class Held:
    """A middleware that lets listen requests in only when it may."""

    def __init__(self, app: Any, may_go_on: asyncio.Event, failed: list[Exception]) -> None:
        self._app = app
        self._may_go_on = may_go_on
        self._failed = failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._may_go_on.wait()
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            self._failed.append(error)
            raise


@pytest.mark.parametrize("behind", [b"", ANOTHER], ids=["nothing", "a request"])
async def test_a_client_that_left_before_its_stream_was_opened_leaves_nothing_and_is_no_error(
    behind: bytes, http: Any
) -> None:
    failed: list[Exception] = []
    may_go_on = asyncio.Event()
    async with serving(partial(Held, may_go_on=may_go_on, failed=failed), http=http) as server:
        state = server.uvicorn.server_state
        _, writer = await asyncio.open_connection(*server.address[:2])
        writer.write(listen_request(1) + behind)
        await until(lambda: state.tasks)
        connection: Any = next(iter(state.connections))
        writer.transport.abort()
        connection.flow.resume_reading()  # as whoever still reads the request would
        await until(lambda: not state.connections)
        may_go_on.set()
        await check_nothing_is_left(server)
        assert not failed


async def test_a_request_behind_a_legacy_stream_is_answered_and_the_session_may_open_another(http: Any) -> None:
    async with serving(http=http) as server:
        session_id = await open_session(server.address[1])
        async with connected(server, get_request(session_id)) as (stream, writer):
            server.change("new")
            assert (await event(stream))["params"]["tool"]["description"] == "new"
            writer.write(ANOTHER)
            assert await rest(stream) == []
            async with asyncio.timeout(DEADLINE):
                assert (await stream._reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: not len(server.live.splice))
        async with connected(server, get_request(session_id)) as (stream, _):
            server.change("newer")
            assert (await event(stream))["params"]["tool"]["description"] == "newer"


@pytest.mark.parametrize("middleware", [Capitals, Wrapped, Delayed])
async def test_a_server_that_stops_without_a_signal_ends_every_stream_gracefully(middleware: Any, http: Any) -> None:
    async with (
        serving(middleware, http=http, timeout_graceful_shutdown=DEADLINE) as server,
        connected(server, listen_request("mine")) as (stream, _),
    ):
        await event(stream)
        assert [type(each) for each in server.outlets] == [Channel]
        server.uvicorn.should_exit = True
        (result,) = await rest(stream)
        assert result["id"] == "mine"
        assert stream.is_terminated


@pytest.mark.parametrize("middleware", [Capitals, Wrapped, Delayed])
async def test_a_server_that_stops_without_a_signal_ends_legacy_streams(middleware: Any, http: Any) -> None:
    async with serving(middleware, http=http, timeout_graceful_shutdown=DEADLINE) as server:
        session_id = await open_session(server.address[1])
        async with connected(server, get_request(session_id)) as (stream, _):
            await until(lambda: len(server.live.splice))
            server.uvicorn.should_exit = True
            assert await rest(stream) == []
            assert stream.is_terminated


async def test_a_guarded_connection_counts_once_and_is_uvicorns_again_after_the_stream(http: Any) -> None:
    async with serving(Delayed, http=http) as server, connected(server, listen_request(1)) as (stream, writer):
        connections: Any = server.uvicorn.server_state.connections
        await event(stream)
        assert [type(each) for each in connections] == [Guard]
        writer.write(ANOTHER)
        await rest(stream)
        assert [type(each) for each in connections] != [Guard]
        assert len(connections) == 1
        async with asyncio.timeout(DEADLINE):
            await stream._reader.readuntil(b'"tools"')
            writer.write(modern_request("tools/list", 3))
            await stream._reader.readuntil(b'"tools"')
