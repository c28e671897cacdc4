"""Several requests on one connection of our own process: lists, requests that the SDK answers, streams.

Most other tests send one request per connection. These tests check that no request affects the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.faults.wire import Stream
from tests.support.http_server import Door, Line, open_door, some_server
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings.http.parking import ParkedStream

pytestmark = pytest.mark.anyio


async def stream_on(line: Line) -> Stream:
    """The listen stream whose response comes next."""
    with anyio.fail_after(DEADLINE):
        head = await line.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return Stream(line.reader, line.writer)


def outlets(door: Door) -> list[type]:
    return [type(stream.response) for stream in door.live.listen_streams]


# The whole response


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_stream_that_has_nothing_to_tell_is_acknowledged_and_ended(connection: str) -> None:
    async with open_door(some_server()) as door, door.line() as line:
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


async def test_a_stream_that_opens_while_the_server_stops_is_acknowledged_and_ended() -> None:
    asked, may = asyncio.Event(), asyncio.Event()

    async def authorize(principal: Any, topic: Any) -> bool:
        asked.set()
        await may.wait()
        return True

    async with open_door(some_server(), authorize=authorize) as door, door.line() as line:
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
        assert outlets(door) == [ParkedStream]
    await until(lambda: not len(door.live.listen_streams))


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
        context = open_door(server)
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
        assert door.sdk_requests > 20
