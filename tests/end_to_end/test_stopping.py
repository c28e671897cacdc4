"""A signal ends every stream as the protocol requires, and then the process, even if clients do not read."""

from __future__ import annotations

import asyncio
import json
import signal
from signal import SIGINT, SIGTERM

import pytest

from tests.support.faults.many_clients import many, open_legacy, open_sessions, open_unread_streams, sockets, update
from tests.support.faults.wire import ALL, START, TIMEOUT, How, Settings, listen, serve
from tests.support.messages import modern_message

pytestmark = pytest.mark.anyio


@pytest.mark.alone
@pytest.mark.parametrize(("how", "number"), [("asgi", SIGTERM), ("run", SIGINT), ("uvicorn", SIGTERM)])
async def test_signal_ends_five_hundred_streams_gracefully(how: How, number: signal.Signals) -> None:
    async with serve(how) as server:
        listening = await many(500, lambda number: listen(server.port, number))
        legacy = await many(50, lambda _: open_legacy(server.port))
        await server.change(update(1))
        resting = [asyncio.ensure_future(stream.rest()) for stream in listening + legacy]
        await server.until(lambda state: (state["listening"], state["legacy_streams"]) == (500, 50))
        server.send_signal(number)
        seconds = await server.wait_for_exit(within=TIMEOUT)
        rests = await asyncio.gather(*resting)
    for request_id, (stream, events) in enumerate(zip(listening, rests, strict=False)):
        told, result = events
        assert told["method"] == "notifications/tools/list_changed"
        assert result["id"] == request_id
        assert result["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == request_id
        assert stream.is_terminated
    for stream, events in zip(legacy, rests[500:], strict=True):
        assert [event["method"] for event in events] == ["notifications/tools/list_changed"]
        assert stream.is_terminated
    assert seconds < 2
    assert not server.errors()


@pytest.mark.alone
@pytest.mark.parametrize(("how", "number"), [("asgi", SIGINT), ("run", SIGTERM)])
async def test_unread_streams_cannot_keep_the_process(how: How, number: signal.Signals) -> None:
    """With the default write deadline of 20 s."""
    async with serve(how, Settings(policy={"journal_changes": 20})) as server:
        streams = await many(5, lambda number: listen(server.port, number))
        resting = [asyncio.ensure_future(stream.rest()) for stream in streams]
        with sockets(await open_unread_streams(server, 10, await open_sessions(server, 5))):
            server.send_signal(number)
            assert await server.wait_for_exit(within=TIMEOUT) < 2
            for request_id, events in enumerate(await asyncio.gather(*resting)):
                assert events[-1]["id"] == request_id
                assert "result" in events[-1]
        assert not server.errors()


@pytest.mark.alone
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
async def test_signal_ends_a_listen_on_stdio_gracefully(number: signal.Signals) -> None:
    async with serve("stdio") as server:
        child = server.process
        assert child.stdin is not None
        assert child.stdout is not None
        async with asyncio.timeout(START):
            message = modern_message("subscriptions/listen", "mine", {"notifications": ALL})
            child.stdin.write(json.dumps(message).encode() + b"\n")
            acknowledged = json.loads(await child.stdout.readline())
        assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
        server.send_signal(number)
        seconds = await server.wait_for_exit(within=TIMEOUT)
        async with asyncio.timeout(TIMEOUT):
            rest = [json.loads(line) async for line in child.stdout]
        (result,) = rest
        assert result["id"] == "mine"
        assert result["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == "mine"
        assert seconds < 2
        assert not server.errors()
