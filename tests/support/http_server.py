"""A live server on a real socket in the event loop of the test, and a client that writes and reads bytes.

The server counts the requests that reach the SDK.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.prompts import Prompt

from tests.support.messages import INITIALIZED, META, MODERN, initialize, modern_message
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tidings import Live, Policy
from tidings.http.router import Router

__all__ = ["META", "HttpResponse", "LocalServer", "RawClient", "example_server", "modern_body", "serving"]


class HttpResponse(NamedTuple):
    status: bytes
    headers: list[tuple[bytes, bytes]]
    """In the order of the response, without the date."""
    body: bytes


def example_server(**options: Any) -> MCPServer[Any]:
    """Return a server with items of every kind."""
    server: MCPServer[Any] = MCPServer("local", log_level="CRITICAL", **options)

    @server.tool()
    def weather(city: str, days: int = 3) -> str:
        """Weather of a city: 100 % — grüße."""
        return city

    @server.tool()
    def clock() -> str:
        return "12"

    server.add_prompt(Prompt.from_function(weather, name="greet"))
    server.resource("local://r")(clock)
    server.resource("local://t/{city}", name="detail")(lambda city: city)
    return server


def modern_body(method: str, request_id: Any = 1, *, params: Any = None, **envelope: Any) -> bytes:
    """Return the body of a modern request."""
    return json.dumps(modern_message(method, request_id, params) | envelope).encode()


@dataclass
class RawClient:
    """One connection."""

    port: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def head(self, body: bytes, headers: Mapping[str, str | None], start: str) -> bytes:
        named = {
            "Host": f"127.0.0.1:{self.port}",
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }
        lines = [start, *(f"{name}: {value}" for name, value in named.items() if value is not None)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def request(self, body: bytes, /, **headers: str | None) -> bytes:
        """Return the bytes of a request; `_` in the name of a header stands for `-`, and `start` is its first line."""
        start = headers.pop("start", None) or "POST /mcp HTTP/1.1"
        return self.head(body, {name.replace("_", "-"): value for name, value in headers.items()}, start) + body

    def modern(self, method: str, request_id: Any = 1, params: Any = None, /, **headers: str | None) -> bytes:
        """Return the bytes of a modern request."""
        named = {"MCP_Protocol_Version": MODERN, "Mcp_Method": method, **headers}
        if params and "name" in params:
            named["Mcp_Name"] = params["name"]
        return self.request(modern_body(method, request_id, params=params), **named)

    def listen_request(
        self, request_id: Any = 1, requested: Any = None, meta: Any = None, **headers: str | None
    ) -> bytes:
        """Return the bytes of a listen request, by default for the list of tools."""
        topics = {"toolsListChanged": True} if requested is None else requested
        params = {"notifications": topics, "_meta": {**META, **(meta or {})}}
        return self.modern("subscriptions/listen", request_id, params, **headers)

    def tool_call(self, name: str, request_id: Any = 1) -> bytes:
        return self.modern("tools/call", request_id, {"name": name, "arguments": {}})

    async def send(self, data: bytes) -> HttpResponse:
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> HttpResponse:
        with anyio.fail_after(DEADLINE):
            status, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
            fields = dict(headers)
            body = b""
            if fields.get(b"transfer-encoding") == b"chunked":
                while size := int(await self.reader.readline(), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readexactly(2)
            else:
                body = await self.reader.readexactly(int(fields.get(b"content-length", b"0")))
        return HttpResponse(status, [header for header in headers if header[0] != b"date"], body)

    async def ended(self) -> bool:
        """Return whether the server closes the connection without sending more."""
        with anyio.fail_after(DEADLINE):
            return await self.reader.read() == b""

    async def initialize(self, version: str, **headers: str | None) -> dict[str, str | None]:
        """Open a legacy session; return the headers that name it."""
        answer = await self.send(self.request(json.dumps(initialize(version)).encode(), **headers))
        session_id = dict(answer.headers)[b"mcp-session-id"].decode()
        named = {**headers, "Mcp_Session_Id": session_id, "MCP_Protocol_Version": version}
        assert b"202" in (await self.send(self.request(json.dumps(INITIALIZED).encode(), **named))).status
        return named


@dataclass
class LocalServer:
    live: Live
    app: Any
    sdk_requests: int = 0
    server: uvicorn.Server = None  # type: ignore[assignment]  # set when it has started

    @property
    def port(self) -> int:
        return int(address_of(self.server)[1])

    @property
    def front(self) -> Router:
        front = self.live.server.session_manager.asgi_app
        assert isinstance(front, Router)
        return front

    @property
    def stream_types(self) -> list[type]:
        """The classes of the response streams of the listen streams."""
        return [type(stream.response) for stream in self.live.listen_streams]

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        try:
            yield RawClient(self.port, reader, writer)
        finally:
            writer.close()

    async def send(self, raw: Any) -> HttpResponse:
        """Send a request on a new connection. `raw` is its bytes, or a function that returns them for a client."""
        async with self.client() as client:
            return await client.send(raw(client) if callable(raw) else raw)

    async def sdk_response(self, raw: Any) -> HttpResponse:
        """Return the response of the SDK, without the list cache."""
        shared, self.live.list_cache.shared_lists = self.live.list_cache.shared_lists, False
        try:
            return await self.send(raw)
        finally:
            self.live.list_cache.shared_lists = shared


@asynccontextmanager
async def serving(
    server: Any,
    *,
    policy: Policy | None = None,
    shared_lists: bool | None = None,
    authorize: Any = None,
    app: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[LocalServer]:
    """Serve on a free port. `app` are options of the app, `config` those of uvicorn."""
    live = Live(server, policy=policy or Policy(list_max_age=3600), shared_lists=shared_lists, authorize=authorize)
    built = live.http_app(**(app or {}))
    local = LocalServer(live, built)

    if hasattr(live.server, "session_manager"):
        sdk = local.front._app

        async def counting(scope: Any, receive: Any, send: Any) -> None:
            local.sdk_requests += 1
            await sdk(scope, receive, send)

        local.front._app = counting  # type: ignore[assignment]
    async with run_uvicorn(built, http="httptools", **config) as local.server:
        yield local
