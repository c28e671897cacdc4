"""The connection at which a stream is opened: what came before and behind, in which pieces, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import anyio
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.support.faults.wire import Stream
from tests.support.http_server import open_door, some_server
from tests.support.loops import anyio_backend
from tests.support.opening import WHOLE_WAY, listens, opening, response, streams, tried
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import LimitReached, Policy
from tidings.lanes.app import _protocol
from tidings.lanes.listen import ListenLane
from tidings.lanes.parked import Parked

__all__ = ["anyio_backend", "tried"]

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_seen", [True, False], ids=["a form that was seen", "a new one"])
async def test_a_stream_is_opened_on_a_connection_that_was_used_before(is_seen: bool, tried: list[bool]) -> None:
    async with opening(timeout_keep_alive=1) as door:
        if is_seen:
            async with door.line() as line:
                await response(line, listens(line))
        tried.clear()
        async with door.line() as line:
            await line.send(line.asks("tools/list"))
            await response(line, listens(line))
            assert tried == [True]
            async with door.line() as other:  # idle for as long as a connection may be
                await other.send(other.asks("tools/list"))
                assert await other.ended()
            door.live.tools.add(lambda: "", name="new")
            with anyio.fail_after(DEADLINE):
                told = await Stream(line.reader, line.writer).event()
            assert told is not None
            assert told["params"]["tool"]["name"] == "new"


@pytest.mark.parametrize("behind", ["a request", "the beginning of one"])
async def test_a_stream_with_something_behind_it_is_not_opened_there(behind: str, tried: list[bool]) -> None:
    async with opening() as door:
        async with door.line() as other:
            await response(other, listens(other))
        await until(lambda: not door.server.server_state.connections)
        async with door.line() as line:
            rest = line.asks("tools/list", 2) if behind == "a request" else b"POST /mcp"
            await response(line, listens(line) + rest)
            assert tried == [True]
            (connection,) = door.server.server_state.connections
            assert isinstance(connection, HttpToolsProtocol)
        await until(lambda: not door.server.server_state.connections)
        assert (door.live.gate.count, streams(door)) == (0, [])


@pytest.mark.parametrize("step", [1, 7, 400])
async def test_it_makes_no_difference_in_which_pieces_a_request_comes(step: int) -> None:
    async with opening() as door, door.line() as line:
        request = listens(line)
        for start in range(0, len(request) - step, step):
            line.writer.write(request[start : start + step])
            await line.writer.drain()
            await asyncio.sleep(0)
        rest = len(range(0, len(request) - step, step)) * step
        assert b"acknowledged" in (await response(line, request[rest:]))[-1]


async def test_on_plain_asgi_a_stream_whose_request_comes_in_two_pieces_is_parked_too() -> None:
    """Its beginning was read before Starlette's layers, and the way to its connection is still known behind them."""
    async with open_door(some_server(), "asgi") as door:
        async with door.line() as line:
            await response(line, listens(line))  # from here on, the form is known
        await until(lambda: not door.server.server_state.connections)
        async with door.line() as line:
            request = listens(line)
            line.writer.write(request[:-10])
            connections: Any = door.server.server_state.connections
            await until(lambda: any(each.cycle for each in connections))
            assert b"acknowledged" in (await response(line, request[-10:]))[-1]
            assert streams(door) == [Parked]


async def test_a_connection_on_which_nothing_came_leaves_nothing_behind() -> None:
    async with opening() as door:
        connections = door.server.server_state.connections
        await until(lambda: not connections)
        async with door.line():
            await until(lambda: len(connections) == 1)
            assert [type(each).__mro__[1] for each in connections] == [_protocol()]
        await until(lambda: not connections)


async def test_a_server_that_stops_ends_a_connection_on_which_nothing_came() -> None:
    async with opening() as door, door.line() as line:
        await until(lambda: len(door.server.server_state.connections) == 1)
        door.server.should_exit = True
        assert await line.ended()


async def test_a_server_that_stops_opens_no_stream_there(tried: list[bool]) -> None:
    async with opening() as door, door.line() as line:
        door.live.is_stopping = True
        said = await response(line, listens(line), is_stream=False)
        assert b"acknowledged" in said[-1]
        assert b'"resultType":"complete"' in said[-1]
        assert tried == [False]


async def test_a_reader_that_vanishes_is_noticed_by_the_kernel(tried: list[bool]) -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("Linux has it")
    policy = Policy(write_deadline=7, keep_alive=5)
    async with opening(policy=policy) as door:
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                await response(line, listens(line, **headers))
                [parked] = door.server.server_state.connections
                assert isinstance(parked, Parked)
                connection = parked._transport.get_extra_info("socket")
                assert connection.getsockopt(socket.IPPROTO_TCP, option) == 12_000
            await until(lambda: not streams(door))
        assert tried == [True, True]


FAILURES = [RuntimeError("a defect"), LimitReached("a limit")]


@pytest.mark.parametrize("failure", FAILURES, ids=["a defect", "a limit"])
async def test_what_fails_before_a_stream_is_parked_goes_the_whole_way(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    async with opening() as door:
        monkeypatch.setattr("tidings.lanes.listen.honour_at_once", fail)
        for _ in range(2):  # a new form, and one that was seen
            async with door.line() as line:
                assert b"acknowledged" in (await response(line, listens(line)))[-1]
                assert streams(door) == [Parked]
            await until(lambda: not streams(door))
        assert door.live.gate.count == 0
        assert ("could not be opened at its connection" in caplog.text) is (failure is FAILURES[0])


@pytest.mark.parametrize("failure", FAILURES, ids=["a defect", "a limit"])
async def test_what_fails_once_a_stream_is_parked_ends_the_connection(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    async with opening() as door:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(ListenLane, "_begin", fail)
                async with door.line() as line:
                    line.writer.write(listens(line))
                    async with asyncio.timeout(DEADLINE):
                        with contextlib.suppress(ConnectionResetError):
                            assert (await line.reader.read()).count(b"HTTP/1.1") <= 1
            await until(lambda: not door.server.server_state.connections)
            assert door.live.gate.count == 0
            async with door.line() as line:  # whose head is remembered
                await response(line, listens(line))
            await until(lambda: not streams(door))
        assert caplog.text.count("could not be opened at its connection") == 2
