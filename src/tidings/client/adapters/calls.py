"""The part that all adapters share: the tools of a mirror, and a call after which they are current."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tidings.client import Mirror
from tidings.errors import TidingsError

__all__ = ["LONGEST_WAIT", "call_tool", "current_tools", "result_text"]

LONGEST_WAIT = 5.0
"""Seconds that a call waits for the lists that it has changed. A step with the old tools is better than a longer
wait."""


def current_tools(mirror: Mirror) -> Mapping[str, types.Tool]:
    """Return the tools, which are the last known ones during a reconnect.

    Raise `Disconnected` if the mirror was never opened: an agent without tools would hide that.
    """
    if not mirror.tools:
        _ = mirror.client
    return mirror.tools


async def call_tool(
    mirror: Mirror, name: str, arguments: Mapping[str, Any] | None, **options: Any
) -> types.CallToolResult:
    """Call a tool. Return when the mirror has fetched the lists that the call has changed, so that the next step of the
    agent has them. An error of the tool is a result with `is_error`."""
    try:
        result = await mirror.call(name, arguments, **options)
    except MCPError as error:
        result = types.CallToolResult(content=[types.TextContent(text=error.message)], is_error=True)
    try:
        async with asyncio.timeout(LONGEST_WAIT):
            await _round_trip(mirror)
            while (status := mirror.status).state == "stale":
                await mirror.next_status(status)
    except (MCPError, TidingsError, TimeoutError):
        pass  # the call itself has succeeded
    return result


async def _round_trip(mirror: Mirror) -> None:
    """Send the cheapest request of the era.

    The server sends a notification of a change before the result of the call that made it, but perhaps on another
    connection. After one more answer, the notification has arrived, too.
    """
    client = mirror.client
    if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
        await client.session.send_discover(client.protocol_version)
    else:
        await client.session.send_request(types.PingRequest(), types.EmptyResult)


def result_text(result: types.CallToolResult) -> str:
    """Return the content of a result as text; blocks that are not text as JSON."""
    return "\n".join(
        block.text if isinstance(block, types.TextContent) else block.model_dump_json(by_alias=True, exclude_none=True)
        for block in result.content
    )
