"""After `Live(server)`, the server's own ways to serve stdio notify clients of both eras, and so does a thread."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.forking import ENVIRONMENT, forked_command
from tests.support.waiting import DEADLINE

HIGH_LEVEL = """
from tidings import Live

@mcp.tool()
def grow() -> str:
    live.tools.add(lambda: "", name="new")
    return "grown"

live = Live(mcp)
"""
MCPSERVER = 'from mcp.server.mcpserver import MCPServer\nmcp = MCPServer("own")' + HIGH_LEVEL
FASTMCP = 'from fastmcp import FastMCP\nmcp = FastMCP("own")' + HIGH_LEVEL
LOWLEVEL = """
import anyio
import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server
from tidings import Live

async def list_tools(ctx, params):
    return types.ListToolsResult(tools=[])

server = Server("own", on_list_tools=list_tools)
live = Live(server)

def grow():
    live.tools.add({"name": "new"}, handler=str)
    return "grown"

live.tools.add({"name": "grow"}, handler=grow)

async def main():
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())
"""
IN_A_THREAD = """
import threading
thread = threading.Thread(target=live.run, args=["stdio"])
thread.start()
thread.join()
"""
PROGRAMS = {
    "MCPServer": MCPSERVER + "mcp.run()",
    "Server": LOWLEVEL + "anyio.run(main)",
    "FastMCP": FASTMCP + "mcp.run()",
    "MCPServer in a thread": MCPSERVER + IN_A_THREAD,
    "Server in a thread": LOWLEVEL + IN_A_THREAD,
    "FastMCP in a thread": FASTMCP + IN_A_THREAD,
}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_clients_of_both_eras_are_notified(tmp_path: Path, program: str, mode: str) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    async def handle(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            told.put_nowait(message.method)

    path = tmp_path / "server.py"
    path.write_text(PROGRAMS[program])
    command, *arguments = forked_command(path)
    parameters = StdioServerParameters(command=command, args=arguments, env=ENVIRONMENT)
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE):
        client = await stack.enter_async_context(Client(stdio_client(parameters), mode=mode, message_handler=handle))
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed
        if mode == "auto":
            await stack.enter_async_context(client.listen(tools_list_changed=True))
        assert (await client.call_tool("grow")).is_error is False
        await told.get()
        assert told.empty()
