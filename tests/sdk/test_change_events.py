"""Change notifications of the user's own code. `tests/end_to_end/test_matrix.py` shows that clients get them once.

Covers `server/middleware.py`.
"""

from __future__ import annotations

from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.server import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler

from tests.support.board_actions import steady
from tests.support.waiting import until
from tidings import Live, Policy

pytestmark = pytest.mark.anyio

CHANGED = types.ToolListChangedNotification()


async def check_received(live: Live, count: int, **call: Any) -> None:
    """Call the tool as a legacy client, and wait until it has got this number of notifications."""
    received: list[str] = []

    async def take(message: Any) -> None:
        received.append(message.method)

    async with Client(live.server, mode="legacy", message_handler=take) as client:
        await client.call_tool("change", call)
        await until(lambda: len(received) == count)
    assert set(received) == {CHANGED.method}


def make_live(**policy: Any) -> Live:
    server: MCPServer[Any] = MCPServer("board")

    @server.tool()
    async def change(ctx: Context[Any, Any], is_related: bool = False) -> None:
        live.tools.add(steady, name="added", replace=True)
        await ctx.session.send_notification(CHANGED, ctx.request_id if is_related else None)

    live = Live(server, policy=Policy(**policy))
    return live


async def test_notification_that_belongs_to_the_request_is_sent() -> None:
    """FastMCP sends such ones to one client when the rules of what that client alone sees change."""
    await check_received(make_live(), 2, is_related=True)


async def test_session_that_tidings_does_not_notify_gets_the_notification_of_the_handler() -> None:
    live = make_live(max_streams=1)
    async with Client(live.server, mode="legacy"):
        await check_received(live, 1)


@pytest.mark.parametrize("is_own", [False, True])
async def test_own_listen_handler_is_reported(is_own: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def listen(ctx: Any, params: Any) -> types.SubscriptionsListenResult:
        raise AssertionError("Live replaces it")

    Live(Server("board", on_subscriptions_listen=listen if is_own else ListenHandler(InMemorySubscriptionBus())))
    assert ("own handler of subscriptions/listen" in caplog.text) is is_own
