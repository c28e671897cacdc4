"""Streams of a server in the test's own event loop, and middlewares that stand before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.middleware.base import BaseHTTPMiddleware

from tests.support.faults.wire import Stream, modern_request
from tests.support.waiting import DEADLINE, until
from tidings import Live
from tidings.http.app import _protocol


class Server:
    """uvicorn with our protocol, in this very event loop."""

    def __init__(self, live: Live, server: uvicorn.Server) -> None:
        self.live = live
        self.uvicorn = server

    @property
    def address(self) -> Any:
        return self.uvicorn.servers[0].sockets[0].getsockname()

    @property
    def outlets(self) -> list[Any]:
        return [stream.channel for streams in self.live.listen._streams for stream in streams]

    def change(self, text: str) -> None:
        self.live.tools.update("echo", description=text)


@asynccontextmanager
async def serving(*middleware: Any, policy: Any = None, around: Any = None, **options: Any) -> AsyncIterator[Server]:
    mcp = MCPServer("parked", log_level="ERROR")
    mcp.add_tool(str.upper, name="echo", description="old")
    live = Live(mcp, policy=policy)
    app = live.http_app()
    for each in middleware:
        app.add_middleware(each)
    options = {"port": 0, "http": _protocol(), "timeout_graceful_shutdown": 1, **options}
    config = uvicorn.Config(app if around is None else around(app), log_level="critical", **options)
    server = Server(live, uvicorn.Server(config))
    # Not `serve()`, which would take the signals of the tests' own process.
    running = asyncio.create_task(server.uvicorn._serve())
    await until(lambda: server.uvicorn.started)
    try:
        yield server
    finally:
        server.uvicorn.should_exit = True
        async with asyncio.timeout(DEADLINE):
            await running


@asynccontextmanager
async def connected(server: Server, sent: bytes, **options: Any) -> AsyncIterator[tuple[Stream, asyncio.StreamWriter]]:
    """A client that has sent this, and read the head of the response."""
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


async def event(stream: Stream) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE):
        told = await stream.event()
    assert told is not None, "the stream ended"
    return told


async def check_told(server: Server, stream: Stream) -> None:
    """The stream is acknowledged, and told of a change."""
    assert (await event(stream))["method"] == "notifications/subscriptions/acknowledged"
    server.change("new")
    assert (await event(stream))["params"]["tool"]["description"] == "new"


async def rest(stream: Stream) -> list[dict[str, Any]]:
    async with asyncio.timeout(DEADLINE):
        return await stream.rest()


class Capitals:
    """A middleware that changes what is sent."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": message["body"].replace(b'"2.0"', b'"2.0" ')}
            await send(message)

        await self._app(scope, receive, changed if scope["type"] == "http" else send)


class Delayed(BaseHTTPMiddleware):
    """A middleware that hands on what is sent in its own time."""

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        return await call_next(request)


class Labelled:
    """A middleware that only adds to the headers."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def labelled(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-label", b"yes")]}
            await send(message)

        await self._app(scope, receive, labelled if scope["type"] == "http" else send)


ANOTHER = modern_request("tools/list", 2)
