"""`Live(server)` is enough: the server's own HTTP app and its own `run` methods are live too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import mcp_types as types
import pytest
import uvicorn
from fastmcp import FastMCP
from mcp.client.client import Client
from mcp.client.sse import sse_client
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette

from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tidings import Live, TidingsError


def hello() -> str:
    return "hello"


async def list_tools(
    ctx: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[])


SERVERS: dict[str, Callable[[], Any]] = {
    "MCPServer": lambda: MCPServer("own", log_level="CRITICAL"),
    "Server": lambda: Server("own", on_list_tools=list_tools),
    "FastMCP": lambda: FastMCP("own"),
}


def own_app(server: Any) -> Starlette:
    app: Starlette = server.streamable_http_app() if hasattr(server, "streamable_http_app") else server.http_app()
    return app


async def check_client(live: Live, url: Any, mode: str, name: str) -> None:
    """Check that a client is promised list changes, and told of one."""
    told: asyncio.Queue[str] = asyncio.Queue()

    async def handle(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            told.put_nowait(message.method)

    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE):
        client = await stack.enter_async_context(Client(url, mode=mode, message_handler=handle))
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed
        if mode != "legacy":
            await stack.enter_async_context(client.listen(tools_list_changed=True))
        if isinstance(live.server, Server):
            live.tools.add({"name": name, "inputSchema": {"type": "object"}}, handler=hello)
        else:
            live.tools.add(hello, name=name)
        await told.get()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", SERVERS)
async def test_own_app_of_a_live_server_notifies_clients_of_both_eras(kind: str) -> None:
    server = SERVERS[kind]()
    live = Live(server)
    async with run_uvicorn(own_app(server), log_level="critical") as running:
        host, port = address_of(running)[:2]
        for mode in ("legacy", "auto"):
            await check_client(live, f"http://{host}:{port}/mcp", mode, f"tool_{mode}")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["MCPServer", "FastMCP"])
async def test_own_run_method_of_a_live_server_serves_a_live_app(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = SERVERS[kind]()
    live = Live(server)
    served: list[Any] = []

    async def serve(self: uvicorn.Server, sockets: Any = None) -> None:
        served.append(self.config.app)

    with monkeypatch.context() as patch:
        patch.setattr(uvicorn.Server, "serve", serve)
        if kind == "FastMCP":
            await server.run_http_async(show_banner=False)
        else:
            await server.run_streamable_http_async()
    async with run_uvicorn(served[0], log_level="critical") as running:
        host, port = address_of(running)[:2]
        await check_client(live, f"http://{host}:{port}/mcp", "legacy", "new")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["MCPServer", "FastMCP"])
async def test_own_sse_app_of_a_live_server_notifies_its_clients(kind: str) -> None:
    """Through the SDK: only this app knows the transport."""
    server = SERVERS[kind]()
    live = Live(server)
    app = server.sse_app() if kind == "MCPServer" else server.http_app(transport="sse")
    async with run_uvicorn(app, log_level="critical") as running:
        host, port = address_of(running)[:2]
        await check_client(live, sse_client(f"http://{host}:{port}/sse"), "legacy", "new")


@pytest.mark.parametrize("call", [lambda live: live.run("sse"), lambda live: live.http_app(transport="sse")])
def test_transport_sse_is_refused_by_its_name(call: Callable[[Live], object]) -> None:
    with pytest.raises(TidingsError, match="does not serve the transport sse"):
        call(Live(FastMCP("own")))


def test_streamable_http_is_another_name_of_http(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("tidings.http.app.serve_app", lambda app, **options: served.append(options["port"]))
    live = Live(MCPServer("own"))
    live.run("streamable-http", port=1)
    live.run("http", port=2)
    assert served == [1, 2]
