"""Streams of legacy sessions: clients that reconnect or resume, and keep-alives. Covers `sent_events.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anyio
import httpx2
import pytest
import sse_starlette

from tests.support.everything import serving as serving_everything
from tests.support.sdk_clients import DEADLINE, serving
from tests.support.streams import serving as serving_here
from tests.support.wire_clients import LegacyWire, Stream, http

__all__ = ["http"]

pytestmark = pytest.mark.anyio

PRIMED, OLDER = "2025-11-25", "2025-06-18"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("mcpserver") as url:
        yield url


async def change(wire: LegacyWire, what: str, **args: Any) -> None:
    await wire.post("tools/call", name="change", arguments={"what": what, "args": args})


async def add(wire: LegacyWire, key: str) -> str:
    """Add a tool, and return the summary of its notification."""
    await change(wire, "add", feature="tools", key=f"{wire.session_id}-{key}")
    return f"tools added {wire.session_id}-{key}"


async def event(stream: Stream) -> dict[str, str]:
    """Return the fields of the next event. A comment has none."""
    fields = (line.partition(": ") for line in (await stream.event()).split("\r\n"))
    return {name: value for name, _, value in fields if name}


async def test_first_event_has_an_id_and_no_data(url: str, http: httpx2.AsyncClient) -> None:
    wire = LegacyWire(url, http, PRIMED)
    await wire.shake_hands()
    async with wire.stream() as stream:
        first = await event(stream)
        assert first["data"] == ""
        told = await add(wire, "lost")
        assert (await stream.received()).summary == told  # as if the client had not read it
    async with wire.stream(first["id"]) as stream:
        assert (await stream.received()).summary == told
        following = await add(wire, "next")
        assert (await stream.received()).summary == following
    await wire.end()


async def test_older_client_gets_no_event_without_data(url: str, http: httpx2.AsyncClient) -> None:
    wire = LegacyWire(url, http, OLDER)
    await wire.shake_hands()
    async with wire.stream() as stream:
        await add(wire, "first")
        assert (await event(stream))["data"].startswith("{")
    await wire.end()


@pytest.mark.parametrize("event_id", ["another-server's", "tidings-", "tidings-x", "tidings-999"])
async def test_unknown_event_id_repeats_all_notifications(url: str, http: httpx2.AsyncClient, event_id: str) -> None:
    wire = LegacyWire(url, http)
    await wire.shake_hands()
    async with wire.stream() as stream:
        told = await add(wire, "once")
        assert (await stream.received()).summary == told
    headers = wire.headers | {"Last-Event-ID": event_id}
    with anyio.fail_after(DEADLINE):
        while True:
            async with http.stream("GET", url, headers=headers) as response:
                if response.status_code == 409:
                    continue  # the server has not detected yet that the former stream ended
                assert response.status_code == 200
                stream = Stream(response, response.aiter_text())
                assert (await stream.received()).summary == told
                break
    await wire.end()


async def test_returning_client_replaces_its_lost_stream(url: str, http: httpx2.AsyncClient) -> None:
    wire = LegacyWire(url, http, OLDER)
    await wire.shake_hands()
    async with wire.stream() as lost:
        await add(wire, "read")
        last = (await event(lost))["id"]
        told = await add(wire, "unread")
        # Without an event id it is a second stream, which the SDK refuses.
        assert (await http.get(url, headers=wire.headers)).status_code == 409
        async with wire.stream(last) as stream:
            assert (await stream.received()).summary == told
            with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
                await read_to_the_end(lost)
            following = await add(wire, "next")
            assert (await stream.received()).summary == following
    await wire.end()


async def read_to_the_end(stream: Stream) -> None:
    while await stream.event():
        pass


async def test_other_callers_cannot_end_the_stream_of_a_session() -> None:
    with serving("mcpserver", auth=True) as url:
        async with (
            httpx2.AsyncClient(headers={"Authorization": "Bearer alice"}, timeout=DEADLINE) as alice,
            httpx2.AsyncClient(headers={"Authorization": "Bearer bob"}, timeout=DEADLINE) as bob,
        ):
            wire = LegacyWire(url, alice)
            await wire.shake_hands()
            async with wire.stream() as stream:
                last = (await event(stream))["id"]
                refused = await bob.get(url, headers=wire.headers | {"Last-Event-ID": last})
                assert refused.status_code == 404
                told = await add(wire, "still")
                assert (await stream.received()).summary == told


async def test_second_handshake_keeps_the_open_stream(url: str, http: httpx2.AsyncClient) -> None:
    wire = LegacyWire(url, http)
    await wire.shake_hands()
    async with wire.stream() as stream:
        await wire.shake_hands()
        for key in ("one", "two"):
            told = await add(wire, key)
            assert (await stream.received()).summary == told
    await wire.end()


async def test_resumed_response_does_not_move_notifications_to_its_stream(http: httpx2.AsyncClient) -> None:
    """A session may have several streams: its standing one, and those on which responses are resumed."""
    with serving_everything() as url:
        wire = LegacyWire(url, http)
        await wire.shake_hands()
        async with wire.stream() as standing:
            # The server closes the stream before it has responded. The client requests the rest by the last event id.
            params = {"name": "test_reconnection", "arguments": {}}
            call = {"jsonrpc": "2.0", "id": "call", "method": "tools/call", "params": params}
            ended = await http.post(url, json=call, headers=wire.headers)
            async with wire.stream(re.findall("id: (.*)\r\n", ended.text)[-1]) as resumed:
                while (message := await resumed.message()).get("id") != "call":
                    pass
            assert message["result"]["content"][0]["text"] == "Here I am again."
            await wire.post("tools/call", name="test_trigger_tool_change", arguments={})
            assert (await standing.received()).summary == "tools added dynamic_tool"


async def test_keep_alive_does_not_end_an_event(http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the Python SDK before 1.23 take the blank line after it for the end of an empty message, once they
    know an event's id."""
    monkeypatch.setattr(sse_starlette.EventSourceResponse, "DEFAULT_PING_INTERVAL", 0.05)
    async with serving_here() as server:
        wire = LegacyWire(f"http://127.0.0.1:{server.address[1]}/mcp", http, OLDER)
        await wire.shake_hands()
        async with http.stream("GET", wire.url, headers=wire.headers) as response:
            chunks = response.aiter_text()
            text = ""
            server.change("before")
            with anyio.fail_after(DEADLINE):
                while text.count(": ping") < 3 or "before" not in text:
                    text += await anext(chunks)
                server.change("after")
                while "after" not in text or not text.endswith("\r\n\r\n"):
                    text += await anext(chunks)
        events = text.split("\r\n\r\n")[:-1]
        assert len(events) == 2
        assert all("\r\ndata: {" in each for each in events)
