"""One request can neither make the server wait for its body, nor take so long that other clients wait."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.faults.wire import Stream, modern_request
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tidings import Live

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live() -> Live:
    mcp = MCPServer("limits", log_level="ERROR")
    mcp.resource("a://b", name="b")(lambda: "content")
    return Live(mcp)


@pytest.fixture
async def port(live: Live) -> AsyncIterator[int]:
    async with run_uvicorn(live.http_app(), log_level="critical") as server:
        yield address_of(server)[1]


def listen(uris: list[str], **meta: Any) -> bytes:
    return modern_request("subscriptions/listen", 1, {"notifications": {"resourceSubscriptions": uris}}, meta)


async def send(port: int, *sent: bytes) -> tuple[int, bytes]:
    """Return the status, and the body or the data of the first event."""
    async with asyncio.timeout(DEADLINE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            for part in sent:
                writer.write(part)
            head = await reader.readuntil(b"\r\n\r\n")
            if b"text/event-stream" in head:
                await reader.readuntil(b"data: ")
                return 200, await reader.readline()
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return int(head.split()[1]), await reader.readexactly(int(length))
        finally:
            writer.close()


async def test_pattern_that_is_too_long_is_not_granted(port: int) -> None:
    _, event = await send(port, listen(["a://" + "*a" * 100_000]))

    assert json.loads(event)["params"]["notifications"] == {}


@pytest.mark.parametrize(
    ("uris", "size"),
    [
        (["a://" + "*a" * 998 + f"{number:04}" for number in range(1_000)], "characters"),
        (["a://" + "b/" * 20 + f"*{number}" for number in range(1_000)], "segments"),
        ([f"a://{number}/" + "*a" * 16 for number in range(1_000)], "wildcards"),
        ([f"a://{{x}}/{number}/{{y}}" for number in range(1_000)], "template variables"),
        ([f"a://{number}{{?x,y}}" for number in range(1_000)], "template variables"),
    ],
)
async def test_patterns_that_are_too_long_together_are_refused(port: int, uris: list[str], size: str) -> None:
    status, body = await send(port, listen(uris))

    assert status == 400
    assert f" {size} together; Policy.max_patterns (1000) allows " in json.loads(body)["error"]["message"]


async def test_error_names_the_limit_of_what_all_streams_of_an_address_watch(live: Live, port: int) -> None:
    requests = [listen([f"a://{number}/{each}" for each in range(10_000)]) for number in range(6)]
    streams = [await Stream.open(port, request) for request in requests]
    assert [stream.status for stream in streams] == [200] * 5 + [400]

    _, body = await send(port, listen(["a://b"]))

    assert json.loads(body)["error"]["message"] == (
        "50000 URIs are watched, and this would add 1; Policy.max_watched_per_caller allows 50000"
    )
    for stream in streams:
        stream.close()
    await until(lambda: not live.subscriptions.limits.watched)


# The size of a body


@pytest.mark.parametrize("method", ["subscriptions/listen", "tools/list", "tools/call"])
async def test_declared_size_of_the_body_is_refused_at_once(port: int, method: str) -> None:
    head = modern_request(method, 1).partition(b"\r\n\r\n")[0]
    head = re.sub(rb"(?i)content-length: \d+", b"content-length: 100000000", head)

    assert await send(port, head + b"\r\n\r\n") == (413, b"Request body too large")


@pytest.mark.parametrize("method", ["subscriptions/listen", "tools/list"])
async def test_chunked_body_is_refused_when_it_exceeds_the_limit(port: int, method: str) -> None:
    head = modern_request(method, 1).partition(b"\r\n\r\n")[0]
    head = re.sub(rb"(?i)content-length: \d+", b"transfer-encoding: chunked", head)
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"

    assert await send(port, head + b"\r\n\r\n", *[chunk] * 5) == (413, b"Request body too large")


# Requests that the SDK refuses


@pytest.mark.parametrize(
    ("notifications", "meta"),
    [
        ({"resourceSubscriptions": "a://b"}, {}),
        ({"toolsListChanged": True}, {"progressToken": 1.5}),
        ({"toolsListChanged": True}, {"io.modelcontextprotocol/logLevel": "loud"}),
    ],
)
async def test_listen_is_refused_as_the_sdk_refuses_it(port: int, notifications: Any, meta: dict[str, Any]) -> None:
    request = modern_request("subscriptions/listen", 1, {"notifications": notifications}, meta)
    plain = MCPServer("limits", log_level="ERROR")
    async with run_uvicorn(plain.streamable_http_app(), log_level="critical") as server:
        expected = await send(address_of(server)[1], request)

    assert expected[0] >= 400
    assert await send(port, request) == expected
