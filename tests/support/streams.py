"""Streams of a server in the test's own event loop, and middleware in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.middleware.base import BaseHTTPMiddleware

from tests.support.faults.wire import Stream, modern_request
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tidings import Live

NEXT_REQUEST = modern_request("tools/list", 2)


class Server:
    """uvicorn in the test's event loop."""

    def __init__(self, live: Live, server: uvicorn.Server) -> None:
        self.live = live
        self.uvicorn = server

    @property
    def address(self) -> Any:
        return address_of(self.uvicorn)

    @property
    def streams(self) -> list[Any]:
        """The response streams of the listen streams."""
        return [stream.response for stream in self.live.listen_streams]

    @property
    def stream_types(self) -> list[type]:
        return [type(stream) for stream in self.streams]

    def change(self, text: str) -> None:
        self.live.tools.update("echo", description=text)


@asynccontextmanager
async def serving(*middleware: Any, policy: Any = None, around: Any = None, **options: Any) -> AsyncIterator[Server]:
    """Serve an app with this middleware; `around` wraps the whole app, and `options` are uvicorn's."""
    mcp = MCPServer("streams", log_level="ERROR")
    mcp.add_tool(str.upper, name="echo", description="old")
    live = Live(mcp, policy=policy)
    app = live.http_app()
    for each in middleware:
        app.add_middleware(each)
    options = {"http": "httptools", "log_level": "critical", **options}
    async with run_uvicorn(app if around is None else around(app), **options) as server:
        yield Server(live, server)


@asynccontextmanager
async def connected(server: Server, sent: bytes, **options: Any) -> AsyncIterator[tuple[Stream, asyncio.StreamWriter]]:
    """Connect, send these bytes, and read the head of the response."""
    if isinstance(server.address, str):
        reader, writer = await asyncio.open_unix_connection(server.address)
    else:
        reader, writer = await asyncio.open_connection(*server.address[:2], **options)
    stream = Stream(reader, writer)
    try:
        writer.write(sent)
        async with asyncio.timeout(DEADLINE):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        yield stream, writer
    finally:
        writer.close()


async def read_event(stream: Stream) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE):
        event = await stream.event()
    assert event is not None, "the stream ended"
    return event


async def check_change(server: Server, stream: Stream, text: str) -> None:
    """Check that the next event is the notification of a change made now."""
    server.change(text)
    assert (await read_event(stream))["params"]["tool"]["description"] == text


async def check_notified(server: Server, stream: Stream) -> None:
    """Check that the stream is acknowledged, and notified of a change."""
    assert (await read_event(stream))["method"] == "notifications/subscriptions/acknowledged"
    await check_change(server, stream, "new")


async def read_rest(stream: Stream) -> list[dict[str, Any]]:
    async with asyncio.timeout(DEADLINE):
        return await stream.rest()


async def check_ended(stream: Stream, request_id: int | str) -> None:
    """Check that the stream ends gracefully, with the result of its request."""
    assert [event["id"] for event in await read_rest(stream)] == [request_id]
    assert stream.is_terminated


class SendMiddleware:
    """Base of middleware that changes messages of responses."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def change(self, message: Any) -> Any:
        raise NotImplementedError

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_changed(message: Any) -> None:
            await send(self.change(message))

        await self._app(scope, receive, send_changed if scope["type"] == "http" else send)


class BodyMiddleware(SendMiddleware):
    """Changes the body."""

    def change(self, message: Any) -> Any:
        if message["type"] == "http.response.body":
            return {**message, "body": message["body"].replace(b'"2.0"', b'"2.0" ')}
        return message


class HeaderMiddleware(SendMiddleware):
    """Only adds a header."""

    def change(self, message: Any) -> Any:
        if message["type"] == "http.response.start":
            return {**message, "headers": [*message["headers"], (b"x-label", b"yes")]}
        return message


class QueueMiddleware(BaseHTTPMiddleware):
    """Passes messages on later, from another task."""

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        return await call_next(request)
