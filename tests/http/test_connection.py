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
from tests.support.http_server import LocalServer, RawClient, example_server, serving
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings.http.parking import ParkedStream

pytestmark = pytest.mark.anyio


async def stream_on(client: RawClient) -> Stream:
    """Read the head of the next response, and return its listen stream."""
    with anyio.fail_after(DEADLINE):
        head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return Stream(client.reader, client.writer)


async def test_stream_that_opens_during_shutdown_is_acknowledged_and_ended() -> None:
    asked, may = asyncio.Event(), asyncio.Event()

    async def authorize(principal: Any, topic: Any) -> bool:
        asked.set()
        await may.wait()
        return True

    async with serving(example_server(), authorize=authorize) as local, local.client() as client:
        client.writer.write(client.listen_request("mine"))
        with anyio.fail_after(DEADLINE):
            await asked.wait()
        local.live.stop()
        for connection in list(local.server.server_state.connections):
            connection.shutdown()  # as uvicorn does
        may.set()
        answer = await client.answer()
        assert b"acknowledged" in answer.body
        assert b'"id":"mine"' in answer.body
        assert await client.ended()
        assert not local.stream_types


# Random requests, one after the other

KINDS = ("list", "new list", "call", "slow call", "empty listen", "elsewhere")


def written(client: RawClient, kind: str, number: int) -> bytes:
    match kind:
        case "list":
            return client.modern("tools/list", number)
        case "new list":
            return client.modern("tools/list", number, X_Number=str(number))
        case "call" | "slow call":
            return client.tool_call("clock" if kind == "call" else "slow", number)
        case "empty listen":
            return client.listen_request(number, {})
        case "listen":
            return client.listen_request(number)
        case _:
            return client.request(b"", start="GET /elsewhere HTTP/1.1")


async def check_line(local: LocalServer, kinds: list[str], cuts: list[int], *, has_stream: bool) -> None:
    async with local.client() as client:
        client.writer.transport.get_extra_info("socket").setsockopt(6, 1, 1)  # no piece waits for the next
        raw = b"".join(written(client, kind, number) for number, kind in enumerate(kinds))
        raw += written(client, "listen", len(kinds)) if has_stream else b""
        places = sorted({0, *(cut % len(raw) for cut in cuts), len(raw)}) if raw else []
        for start, end in itertools.pairwise(places):
            client.writer.write(raw[start:end])
            await anyio.lowlevel.checkpoint()
            check_clocks(local)
        for number, kind in enumerate(kinds):
            answer = await client.answer()
            check_clocks(local)
            assert (b"404" if kind == "elsewhere" else b"200") in answer.status
            if kind == "empty listen":
                assert b'"id":%d' % number in answer.body
            elif kind != "elsewhere":
                assert json.loads(answer.body)["id"] == number
        if not has_stream:
            assert json.loads((await client.send(client.modern("tools/list", "last"))).body)["id"] == "last"
            return
        stream = await stream_on(client)
        with anyio.fail_after(DEADLINE):
            assert await stream.event() is not None
            check_clocks(local)
            local.live.tools.update("clock", description=f"{local.live.catalog.revision}")
            assert await stream.event() is not None
        assert local.stream_types == [ParkedStream]
    await until(lambda: not len(local.live.listen_streams))


def check_clocks(local: LocalServer) -> None:
    """Check that no connection with an unfinished response counts as idle."""
    for each in local.server.server_state.connections:
        cycle: Any = getattr(each, "cycle", None)
        if cycle is not None and not cycle.response_complete:
            assert each.timeout_keep_alive_task is None  # type: ignore[union-attr]  # uvicorn's own, as `cycle` is


def test_requests_on_one_connection_get_responses_in_order() -> None:
    server = example_server()

    async def slow() -> str:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return "done"

    server.add_tool(slow, name="slow")
    with asyncio.Runner() as runner:
        context = serving(server)
        local = runner.run(context.__aenter__())

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            kinds=st.lists(st.sampled_from(KINDS), max_size=5),
            cuts=st.lists(st.integers(0, 5000), max_size=6),
            has_stream=st.booleans(),
        )
        def check(kinds: list[str], cuts: list[int], has_stream: bool) -> None:
            runner.run(check_line(local, kinds, cuts, has_stream=has_stream))

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
        assert local.sdk_requests > 20
