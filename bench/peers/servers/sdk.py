"""Serve the official Python SDK as its documentation shows: an `MCPServer`, its bus, plain uvicorn.

The SDK cannot notify legacy sessions outside a request, so a middleware keeps the sessions, and a change notifies each
in turn. Private parts are used to raise the limit of 1,024 streams, and to change a tool in place: removing and adding
it would cost two milliseconds more.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated, ToolsListChanged

from bench.peers.servers.scene import (
    CHANGING,
    DESCRIPTION,
    TOUCHED,
    controls,
    find_tickets,
    read_options,
    serve_plainly,
    version_text,
)

__all__ = ["build"]


class Sessions:
    """The middleware that keeps the sessions of legacy clients."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    async def __call__(self, ctx: Any, call_next: Any) -> Any:
        if ctx.method == "notifications/initialized":
            self.open.append(ctx.session)
        return await call_next(ctx)


def build(tools: int) -> MCPServer[Any]:
    bus = InMemorySubscriptionBus()
    sessions = Sessions()
    server: MCPServer[Any] = MCPServer("bench", subscriptions=bus, middleware=[sessions], log_level="WARNING")
    handler = ListenHandler(bus, max_subscriptions=50_000)
    server._lowlevel_server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, handler)

    async def change_to(version: int) -> None:
        changing.description = version_text(version)
        await bus.publish(ToolsListChanged())
        for session in sessions.open:
            await session.send_tool_list_changed()

    async def touch(uri: str) -> None:
        await bus.publish(ResourceUpdated(uri=uri))

    async def touch_many(ctx: Context[Any, Any], count: int) -> str:
        for number in range(count):
            await ctx.session.send_resource_updated(f"{TOUCHED}/{number}")
        return "done"

    server.add_tool(touch_many, name="touch")
    for number in range(tools - 2):
        server.add_tool(find_tickets, name=f"tool_{number}", description=DESCRIPTION)
    server.add_tool(find_tickets, name=CHANGING, description=version_text(0))
    changing: Any = server._tool_manager.get_tool(CHANGING)
    server.resource("bench://all", name="all")(lambda: "all")
    controls(server.custom_route, change_to, touch)
    return server


if __name__ == "__main__":
    options = read_options()
    built = build(options.tools)
    if options.transport == "stdio":
        built.run("stdio")
    else:
        serve_plainly(built.streamable_http_app(max_sessions=None))
