"""A live server with a console on a real socket, in the event loop of the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2

from tests.support.http_server import example_server
from tests.support.sdk_clients import DEADLINE
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.wire_clients import LegacyWire, Wire
from tidings import Live
from tidings.wire.sse import Event, read_events

__all__ = ["MARKER", "ConsoleServer", "Events", "serving_console"]

MARKER = {"X-Tidings-Console": "1"}


@dataclass
class ConsoleServer:
    live: Live
    url: str
    """Without a path."""
    http: httpx2.AsyncClient

    async def get(self, path: str, **params: Any) -> Any:
        """Return the JSON of a view."""
        response = await self.http.get(f"/console/api/{path}", params=params)
        assert response.status_code == 200, response.text
        return response.json()

    async def post(self, path: str, body: Any = None) -> httpx2.Response:
        return await self.http.post(f"/console/api/{path}", json=body or {}, headers=MARKER)

    async def until(self, condition: Any, path: str, **params: Any) -> Any:
        """Return the first JSON of a view that a condition accepts."""
        with anyio.fail_after(DEADLINE):
            while not condition(found := await self.get(path, **params)):
                pass
        return found

    async def newest_change(self) -> dict[str, Any]:
        """Return the newest change with its deliveries."""
        changes = (await self.get("changes", limit=1))["changes"]
        change: dict[str, Any] = await self.get(f"changes/{changes[0]['id']}")
        return change

    def modern(self) -> Wire:
        return Wire(f"{self.url}/mcp", self.http)

    def legacy(self, version: str = "2025-11-25") -> LegacyWire:
        return LegacyWire(f"{self.url}/mcp", self.http, version)

    def change(self, text: str) -> None:
        """Change a tool, and publish the change now."""
        self.live.tools.update("clock", description=text)
        self.live.bridge.publish_queued()

    @asynccontextmanager
    async def events(self) -> AsyncIterator[Events]:
        async with self.http.stream("GET", "/console/api/events") as response:
            assert response.status_code == 200, await response.aread()
            yield Events(read_events(response.aiter_bytes()))


@dataclass
class Events:
    """The stream of events of one page."""

    events: AsyncIterator[Event]

    async def next(self) -> tuple[str, Any]:
        """Return the name and the data of the next event."""
        with anyio.fail_after(DEADLINE):
            async for event in self.events:
                return event.name, json.loads(event.data)
        raise EOFError("the stream ended")

    async def until(self, name: str, condition: Any = lambda data: True) -> Any:
        """Return the data of the next event with a name that a condition accepts."""
        while True:
            found, data = await self.next()
            if found == name and condition(data):
                return data


@asynccontextmanager
async def serving_console(
    console: Any = True, *, server: Any = None, token: str | None = None, security: Any = None, **live: Any
) -> AsyncIterator[ConsoleServer]:
    """Serve. `live` are options of `Live`."""
    made = Live(server or example_server(), **live)
    app = made.http_app(**({} if token else {"console": console}))
    if token:
        app.router.routes.extend(made.console_routes(console, token=token, security=security))
    async with run_uvicorn(app, http="httptools") as uvicorn:
        url = f"http://127.0.0.1:{address_of(uvicorn)[1]}"
        # The server uses plain HTTP, and loading the certificates takes longer than a test.
        async with httpx2.AsyncClient(base_url=url, timeout=httpx2.Timeout(DEADLINE), verify=False) as http:
            yield ConsoleServer(made, url, http)
