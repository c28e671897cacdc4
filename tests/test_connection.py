"""One connection of our own process and all that may come on it: lists answered there, requests of the SDK's, streams.

The other tests of both halves mostly ask once per connection; here is what one request leaves behind for the next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.faults.wire import Stream
from tests.support.http_server import FRONTS, Door, Line, open_door, some_server
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings.lanes.parked import Parked

pytestmark = pytest.mark.anyio

KEEP_ALIVE = 0.1


@asynccontextmanager
async def slow_door(front: str = "connection", **options: Any) -> AsyncIterator[tuple[Door, asyncio.Event]]:
    """With a tool that takes until the event is set, and connections that may not be idle for long."""
    may = asyncio.Event()
    server = some_server()

    async def slow() -> str:
        await may.wait()
        return "done"

    server.add_tool(slow, name="slow")
    async with open_door(server, front, timeout_keep_alive=KEEP_ALIVE, **options) as door:
        for _ in range(3):
            await door.send(lambda line: line.asks("tools/list"))
        try:
            yield door, may
        finally:
            may.set()


async def idle_end(door: Door) -> None:
    """Wait until a connection that is idle from now on has been ended for it."""
    async with door.line() as line:
        await line.send(line.asks("tools/list"))
        assert await line.ended()


async def stream_on(line: Line) -> Stream:
    """The listen stream whose response comes next."""
    with anyio.fail_after(DEADLINE):
        head = await line.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return Stream(line.reader, line.writer)


def outlets(door: Door) -> list[type]:
    return [type(stream.channel) for streams in door.live.listen._streams for stream in streams]


# One piece


@pytest.mark.parametrize("is_seen", [True, False], ids=["a form that was seen", "a new one"])
async def test_a_slow_request_behind_a_list_in_one_piece_is_not_taken_for_idleness(is_seen: bool) -> None:
    async with slow_door() as (door, may), door.line() as line:
        before = door.counts["connection"]
        first = line.asks("tools/list", 1, **({} if is_seen else {"X_New": "yes"}))
        line.writer.write(first + line.calls("slow", 2))
        assert json.loads((await line.answer()).body)["id"] == 1
        assert door.counts["connection"] == before + 1
        await idle_end(door)
        may.set()
        assert json.loads((await line.answer()).body)["result"]["content"][0]["text"] == "done"
        assert await line.ended()  # now it is idle


async def test_a_stream_behind_a_list_in_one_piece_is_not_taken_for_idleness() -> None:
    async with slow_door() as (door, _), door.line() as line:
        line.writer.write(line.asks("tools/list", 1) + line.listens(2))
        assert json.loads((await line.answer()).body)["id"] == 1
        stream = await stream_on(line)
        with anyio.fail_after(DEADLINE):
            acknowledged = await stream.event()
        assert acknowledged is not None
        assert outlets(door) == [Parked]
        await idle_end(door)
        door.live.tools.add(lambda: "", name="new")
        with anyio.fail_after(DEADLINE):
            told = await stream.event()
        assert told is not None
        assert told["params"]["tool"]["name"] == "new"


# The whole response


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_stream_that_has_nothing_to_tell_is_acknowledged_and_ended(front: str, connection: str) -> None:
    async with open_door(some_server(), front) as door, door.line() as line:
        line.writer.write(line.listens("mine", {}, Connection=connection))
        answer = await line.answer()
        told = [json.loads(each[6:]) for each in answer.body.split(b"\r\n") if each.startswith(b"data: ")]
        assert told[0]["method"] == "notifications/subscriptions/acknowledged"
        assert told[1]["id"] == "mine"
        said = [value for name, value in answer.headers if name == b"connection"]
        assert said == ([b"close"] if connection == "close" else [])
        if connection == "close":
            assert await line.ended()
        else:
            assert b"200" in (await line.send(line.asks("tools/list"))).status


@pytest.mark.parametrize("front", FRONTS)
async def test_a_stream_that_opens_while_the_server_stops_is_acknowledged_and_ended(front: str) -> None:
    asked, may = asyncio.Event(), asyncio.Event()

    async def authorize(principal: Any, topic: Any) -> bool:
        asked.set()
        await may.wait()
        return True

    async with open_door(some_server(), front, authorize=authorize) as door, door.line() as line:
        line.writer.write(line.listens("mine"))
        with anyio.fail_after(DEADLINE):
            await asked.wait()
        door.live.stop()
        for connection in list(door.server.server_state.connections):
            connection.shutdown()  # as uvicorn does
        may.set()
        answer = await line.answer()
        assert b"acknowledged" in answer.body
        assert b'"id":"mine"' in answer.body
        assert await line.ended()
        assert not outlets(door)


# Whatever comes, one after the other

KINDS = ("list", "new list", "call", "slow call", "empty listen", "elsewhere")


def written(line: Line, kind: str, number: int) -> bytes:
    match kind:
        case "list":
            return line.asks("tools/list", number)
        case "new list":
            return line.asks("tools/list", number, X_Number=str(number))
        case "call" | "slow call":
            return line.calls("clock" if kind == "call" else "slow", number)
        case "empty listen":
            return line.listens(number, {})
        case "listen":
            return line.listens(number)
        case _:
            return line.request(b"", start="GET /elsewhere HTTP/1.1")


async def check_line(door: Door, kinds: list[str], cuts: list[int], *, has_stream: bool) -> None:
    async with door.line() as line:
        line.writer.transport.get_extra_info("socket").setsockopt(6, 1, 1)  # no piece waits for the next
        raw = b"".join(written(line, kind, number) for number, kind in enumerate(kinds))
        raw += written(line, "listen", len(kinds)) if has_stream else b""
        places = sorted({0, *(cut % len(raw) for cut in cuts), len(raw)}) if raw else []
        for start, end in itertools.pairwise(places):
            line.writer.write(raw[start:end])
            await anyio.lowlevel.checkpoint()
            check_clocks(door)
        for number, kind in enumerate(kinds):
            answer = await line.answer()
            check_clocks(door)
            assert (b"404" if kind == "elsewhere" else b"200") in answer.status
            if kind == "empty listen":
                assert b'"id":%d' % number in answer.body
            elif kind != "elsewhere":
                assert json.loads(answer.body)["id"] == number
        if not has_stream:
            assert json.loads((await line.send(line.asks("tools/list", "last"))).body)["id"] == "last"
            return
        stream = await stream_on(line)
        with anyio.fail_after(DEADLINE):
            assert await stream.event() is not None
            check_clocks(door)
            door.live.tools.update("clock", description=f"{door.live.catalog.revision}")
            assert await stream.event() is not None
        assert outlets(door) == [Parked]
    await until(lambda: not len(door.live.listen))


def check_clocks(door: Door) -> None:
    """No connection on which a request is being answered counts as idle."""
    for each in door.server.server_state.connections:
        cycle: Any = getattr(each, "cycle", None)
        if cycle is not None and not cycle.response_complete:
            assert each.timeout_keep_alive_task is None  # type: ignore[union-attr]  # uvicorn's own, as `cycle` is


def test_whatever_comes_on_one_connection_is_answered_in_its_order() -> None:
    server = some_server()

    async def slow() -> str:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return "done"

    server.add_tool(slow, name="slow")
    with asyncio.Runner() as runner:
        context = open_door(server, "connection")
        door = runner.run(context.__aenter__())

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            kinds=st.lists(st.sampled_from(KINDS), max_size=5),
            cuts=st.lists(st.integers(0, 5000), max_size=6),
            has_stream=st.booleans(),
        )
        def check(kinds: list[str], cuts: list[int], has_stream: bool) -> None:
            runner.run(check_line(door, kinds, cuts, has_stream=has_stream))

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
        assert door.counts["connection"] > 20
        assert door.counts["sdk"] > 20
