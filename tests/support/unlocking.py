"""A live server whose tools add and remove other tools, and the calls that an agent makes to see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp.client.client import Client
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from tests.support.http_server import serving
from tidings import Mirror

__all__ = ["CALLS", "TOOLS_OF_EACH_STEP", "opened", "unlocking_server"]

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("unlock", {}),
    ("secret", {"word": "tidings"}),
    ("fail", {}),
]
"""The calls of an agent, one per step."""
TOOLS_OF_EACH_STEP = [
    {"unlock", "fail"},
    {"unlock", "fail", "secret"},
    {"fail", "secret"},
    {"fail", "secret"},
]
"""The tools before each of these calls, and after the last one."""


def unlocking_server() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("unlocking", log_level="CRITICAL")

    def secret(word: str) -> str:
        """Say a word."""
        server.remove_tool("unlock")
        return f"the word is {word}"

    @server.tool()
    def unlock() -> str:
        """Add the tool `secret`."""
        server.add_tool(secret)
        return "unlocked"

    @server.tool()
    def fail() -> str:
        raise ToolError("the disk is full")

    return server


@asynccontextmanager
async def opened(era: str) -> AsyncIterator[Mirror]:
    """Serve over HTTP, and open a mirror of this era."""
    async with serving(unlocking_server()) as local:
        url = f"http://127.0.0.1:{local.port}/mcp"
        async with Mirror(Client(url, mode="legacy") if era == "legacy" else url) as mirror:
            yield mirror
