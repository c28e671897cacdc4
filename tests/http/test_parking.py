"""Parked streams: when a connection is parked and when it is not, what is let go with it, and what it does then.

What a stream says is the same on both fronts, and tested over both elsewhere; here is what only the parked one has.
Other connections than plain TCP are in test_parked_connections.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest

from tests.support.faults.wire import ALL, listen_request
from tests.support.loops import anyio_backend
from tests.support.streams import (
    ANOTHER,
    Capitals,
    Delayed,
    Labelled,
    check_told,
    connected,
    event,
    rest,
    serving,
)
from tests.support.waiting import DEADLINE, until
from tidings import Feature, Reason
from tidings.http.parking import Parked
from tidings.http.stream import Channel

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio
KINDS = (
    *("Parked", "ListenStream", "Subscriber"),
    *("Channel", "Connection", "RequestResponseCycle", "HttpRequestParser"),
)


# What is let go


async def test_a_parked_stream_keeps_neither_task_nor_cycle_nor_parser_nor_protocol() -> None:
    gc.collect()
    there = counted()  # what tests of other files have left in this process
    async with serving() as server, connected(server, listen_request(0)) as (first, _):
        await check_told(server, first)
        before = len(asyncio.all_tasks())
        gc.collect()
        gc.disable()  # what only the collector finds would be found too late, and by all
        try:
            async with (
                connected(server, listen_request(1)) as (second, _),
                connected(server, listen_request(2)) as (third, _),
            ):
                await event(second)
                await event(third)
                assert [type(outlet) for outlet in server.outlets] == [Parked] * 3
                await until(lambda: len(asyncio.all_tasks()) == before)
                await until(lambda: not server.uvicorn.server_state.tasks)
                assert kept(there) == {"Parked": 3, "ListenStream": 3, "Subscriber": 3}
            await until(lambda: len(server.outlets) == 1)
            await until(lambda: kept(there) == {"Parked": 1, "ListenStream": 1, "Subscriber": 1})
        finally:
            gc.enable()
        assert server.live.gate.count == 1


def counted() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each).__name__ in KINDS)


def kept(there: Counter[str]) -> dict[str, int]:
    """What is there now and was not."""
    return dict(counted() - there)


class Receiving:
    """A middleware that receives in a task of its own, and waits for it at the end."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received: asyncio.Queue[Any] = asyncio.Queue()

        async def pass_on() -> None:
            message = None
            while message is None or message["type"] != "http.disconnect":
                message = await receive()
                await received.put(message)

        passing = asyncio.create_task(pass_on())
        await self._app(scope, received.get, send)
        await passing


async def test_behind_one_uvicorns_own_connections_are_not_found() -> None:
    async with (
        serving(Receiving, http="httptools") as server,
        connected(server, listen_request(1)) as (stream, _),
    ):
        await check_told(server, stream)
        assert [type(outlet) for outlet in server.outlets] == [Channel]
        server.live.stop()
        await rest(stream)


async def test_a_middleware_that_still_receives_is_let_go() -> None:
    async with serving(Receiving) as server:
        before = len(asyncio.all_tasks())
        async with connected(server, listen_request(1)) as (stream, _):
            await check_told(server, stream)
            assert [type(outlet) for outlet in server.outlets] == [Parked]
            await until(lambda: not server.uvicorn.server_state.tasks)
            assert len(asyncio.all_tasks()) == before


async def test_the_server_goes_on_counting_requests_and_connections() -> None:
    async with serving() as server:
        state = server.uvicorn.server_state
        async with connected(server, listen_request(1)) as (stream, _):
            await event(stream)
            assert state.total_requests == 1
            (connection,) = state.connections
            assert isinstance(connection, Parked)
        await until(lambda: not state.connections)


async def test_a_server_that_stops_without_a_signal_ends_parked_streams_gracefully() -> None:
    """Its shutdown asks each connection to end; plain requests are waited for."""
    async with (
        serving(timeout_graceful_shutdown=DEADLINE) as server,
        connected(server, listen_request("mine")) as (stream, _),
    ):
        await event(stream)
        server.uvicorn.should_exit = True
        (result,) = await rest(stream)
        assert result["id"] == "mine"
        assert stream.is_terminated


# When a stream is not parked


@pytest.mark.parametrize("is_ours", [True, False], ids=["our protocol", "uvicorn's"])
@pytest.mark.parametrize(("middleware", "outlet"), [(Capitals, Channel), (Delayed, Channel), (Labelled, Parked)])
async def test_a_stream_is_parked_only_if_it_reaches_the_connection_as_it_was_sent(
    middleware: Any, outlet: type, is_ours: bool
) -> None:
    options = {} if is_ours else {"http": "httptools"}
    async with serving(middleware, **options) as server, connected(server, listen_request(1)) as (stream, _):
        await check_told(server, stream)
        assert [type(each) for each in server.outlets] == [outlet]
        server.live.stop()
        (result,) = await rest(stream)
        assert result["id"] == 1
        assert stream.is_terminated


class Waiting:
    """A middleware that goes on only when it may, after the start of the response."""

    def __init__(self, app: Any, started: asyncio.Event, may_go_on: asyncio.Event, failed: list[Exception]) -> None:
        self._app = app
        self._started = started
        self._may_go_on = may_go_on
        self._failed = failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def waiting(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self._started.set()
                await self._may_go_on.wait()

        try:
            await self._app(scope, receive, waiting if scope["type"] == "http" else send)
        except Exception as error:
            self._failed.append(error)
            raise


@pytest.mark.parametrize("is_ours", [True, False], ids=["our protocol", "uvicorn's"])
async def test_a_client_that_leaves_before_its_response_has_left_is_no_error(is_ours: bool) -> None:
    failed: list[Exception] = []
    started, may_go_on = asyncio.Event(), asyncio.Event()
    middleware = partial(Waiting, started=started, may_go_on=may_go_on, failed=failed)
    async with serving(middleware, **({} if is_ours else {"http": "httptools"})) as server:
        _, writer = await asyncio.open_connection(*server.address[:2])
        writer.write(listen_request(1))
        async with asyncio.timeout(DEADLINE):
            await started.wait()
        writer.close()
        state = server.uvicorn.server_state
        await until(lambda: not state.connections)
        may_go_on.set()
        await until(lambda: not state.tasks)
        assert not failed
        assert server.live.gate.count == 0


async def test_a_client_of_http_1_0_is_not_parked() -> None:
    async with serving() as server, connected(server, listen_request(1).replace(b"HTTP/1.1", b"HTTP/1.0", 1)):
        await until(lambda: len(server.outlets) == 1)
        assert isinstance(server.outlets[0], Channel)


@pytest.mark.parametrize("behind", [ANOTHER, ANOTHER[:30]], ids=["a request", "the beginning of one"])
async def test_a_stream_with_another_request_behind_it_is_not_parked(behind: bytes) -> None:
    """Nor is it kept: what is behind it would wait for ever."""
    async with serving() as server:
        async with connected(server, listen_request(1) + behind) as (stream, _):
            assert (await event(stream))["method"] == "notifications/subscriptions/acknowledged"
            assert [told["id"] for told in await rest(stream)] == [1]
            assert stream.is_terminated, "the connection is left for the request behind it"
        live, state = server.live, server.uvicorn.server_state
        await until(lambda: not state.connections and not state.tasks)
        assert (live.gate.count, len(live.listen), len(live.hub)) == (0, 0, 0)


async def test_with_another_parser_there_is_nothing_to_park_with() -> None:
    async with serving(http="h11") as server, connected(server, listen_request(1)) as (stream, _):
        await check_told(server, stream)
        assert [type(each) for each in server.outlets] == [Channel]


# What comes in on a parked connection


async def test_a_request_that_comes_in_later_ends_the_stream_and_the_connection() -> None:
    """It would wait for the end of a response that has none."""
    async with serving() as server, connected(server, listen_request("mine")) as (stream, writer):
        await event(stream)
        assert isinstance(server.outlets[0], Parked)
        writer.write(ANOTHER)
        (result,) = await rest(stream)
        assert result["id"] == "mine"
        assert stream.is_terminated
        await until(lambda: not server.outlets)
        assert server.live.gate.count == 0
        assert dict(server.live.hub.counts.closed) == {Reason.REPLACED: 1}


async def test_the_connection_that_loses_its_name_to_another_is_no_shutdown() -> None:
    durable = {"dev.tidings/durable": {"name": "mine", "ttl": 60}}
    async with serving() as server, connected(server, listen_request(1, meta=durable)) as (older, _):
        await event(older)
        async with connected(server, listen_request(2, meta=durable)) as (newer, _):
            await check_told(server, newer)
            (result,) = await rest(older)
            assert result["id"] == 1
            assert dict(server.live.hub.counts.closed) == {Reason.REPLACED: 1}


async def test_a_line_break_after_the_request_is_none() -> None:
    async with serving() as server, connected(server, listen_request(1)) as (stream, writer):
        await event(stream)
        writer.write(b"\r\n")
        await writer.drain()
        server.change("first")
        assert (await event(stream))["params"]["tool"]["description"] == "first"
        # Surely read by now: what is written is answered in the order in which it comes.
        server.change("second")
        assert (await event(stream))["params"]["tool"]["description"] == "second"
        assert isinstance(server.outlets[0], Parked)


# What all share


async def test_an_acknowledgement_that_is_shared_says_what_is_true_now_and_whose_it_is() -> None:
    said = []
    async with serving() as server:
        for request_id in (1, "two", 3):
            if request_id == 3:
                server.change("new")
            async with connected(server, listen_request(request_id, ALL)) as (stream, _):
                meta = (await event(stream))["params"]["_meta"]
            assert meta["io.modelcontextprotocol/subscriptionId"] == request_id
            said.append(meta["dev.tidings/cursor"]["topics"])
        assert said[0] == said[1]
        assert said[2]["tools"]["revision"] == server.live.catalog.version(Feature.TOOLS).revision
        assert said[2]["tools"] != said[1]["tools"]
        assert said[2]["prompts"] == said[1]["prompts"]
