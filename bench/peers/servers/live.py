"""Serve Tidings with all features: digests, journal, an authorization hook, limits and keep-alives.

On plain ASGI, as `uvicorn app:app` does, or in its own process, as `live.run("http")` does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mcp.server.mcpserver import MCPServer

from bench.peers.servers.scene import (
    CHANGING,
    DESCRIPTION,
    PATIENT,
    TOUCHED,
    announce,
    controls,
    find_tickets,
    listening_socket,
    read_options,
    serve_plainly,
    version_text,
)
from tidings import Live, Policy, Principal, Topic
from tidings.http.app import serve_app

__all__ = ["build"]


def may_watch(principal: Principal | None, topic: Topic) -> bool:
    return topic != "bench://secret"


def build(tools: int) -> Live:
    server: MCPServer[Any] = MCPServer("bench", log_level="WARNING")

    async def change_to(version: int) -> None:
        live.tools.update(CHANGING, description=version_text(version))
        await asyncio.sleep(0)  # the changes of one turn of the event loop would be one notification

    async def touch(uri: str) -> None:
        live.resources.updated(uri)
        await asyncio.sleep(0)

    async def touch_many(count: int) -> str:
        for number in range(count):
            live.resources.updated(f"{TOUCHED}/{number}")
            await asyncio.sleep(0)  # let the event loop write, as the SDK does after each
        return "done"

    server.add_tool(touch_many, name="touch")
    for number in range(tools - 2):
        server.add_tool(find_tickets, name=f"tool_{number}", description=DESCRIPTION)
    server.add_tool(find_tickets, name=CHANGING, description=version_text(0))
    server.resource("bench://all", name="all")(lambda: "all")
    controls(server.custom_route, change_to, touch)
    live = Live(server, policy=Policy(max_streams_per_address=50_000), authorize=may_watch)
    return live


def main() -> None:
    options = read_options()
    live = build(options.tools)
    if options.transport == "stdio":
        live.run("stdio")
    elif options.own_process:
        # The same as `live.run("http")`, on a free port, with a long idle timeout.
        listener = listening_socket()
        announce(listener.getsockname()[1])
        serve_app(live.http_app(max_sessions=None), sockets=[listener], log_level="warning", **PATIENT)
    else:
        serve_plainly(live.http_app(max_sessions=None))


if __name__ == "__main__":
    main()
