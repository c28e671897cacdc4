"""Serve FastMCP 4 on plain uvicorn. It has no listen streams; a middleware keeps the legacy sessions."""

from __future__ import annotations

from typing import Any

from fastmcp import Context, FastMCP
from fastmcp.server.middleware import Middleware, MiddlewareContext
from fastmcp.tools import Tool

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


class Sessions(Middleware):
    def __init__(self) -> None:
        self.open: list[Any] = []

    async def on_initialize(self, context: MiddlewareContext[Any], call_next: Any) -> Any:
        result = await call_next(context)
        if context.fastmcp_context is not None:
            self.open.append(context.fastmcp_context.session)
        return result


def build(tools: int) -> FastMCP[Any]:
    sessions = Sessions()
    server: FastMCP[Any] = FastMCP("bench", middleware=[sessions])

    def add(name: str, description: str) -> None:
        server.add_tool(Tool.from_function(find_tickets, name=name, description=description))

    async def change_to(version: int) -> None:
        server.local_provider.remove_tool(CHANGING)
        server.add_tool(changing.model_copy(update={"description": version_text(version)}))
        for session in sessions.open:
            await session.send_tool_list_changed()

    async def touch(uri: str) -> None:
        for session in sessions.open:
            await session.send_resource_updated(uri)

    async def touch_many(ctx: Context, count: int) -> str:
        for number in range(count):
            await ctx.session.send_resource_updated(f"{TOUCHED}/{number}")
        return "done"

    touch_many.__annotations__["ctx"] = Context  # FastMCP needs the class, not its name
    server.add_tool(Tool.from_function(touch_many, name="touch"))
    for number in range(tools - 2):
        add(f"tool_{number}", DESCRIPTION)
    changing = Tool.from_function(find_tickets, name=CHANGING, description=version_text(0))
    server.add_tool(changing)
    controls(server.custom_route, change_to, touch)
    return server


if __name__ == "__main__":
    options = read_options()
    built = build(options.tools)
    if options.transport == "stdio":
        built.run("stdio", show_banner=False)
    else:
        serve_plainly(built.http_app())
